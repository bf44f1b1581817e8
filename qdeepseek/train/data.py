"""From the `data` config group to datasets: the standard library's sources, text files, or chat messages."""

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from qdeepseek.data.corpus import corpus_hash, stdlib_documents
from qdeepseek.data.windows import TokenWindows, collate_windows, join_documents
from qdeepseek.train.config import ConfigError
from qdeepseek.train.datamodule import Collate, TokenDataModule


@dataclass(frozen=True)
class DataConfig:
    """`kind` stdlib: windows of `length` tokens, starting every `stride` tokens in training."""

    kind: str = "stdlib"
    length: int = 256
    stride: int | None = None
    batch_size: int = 8
    workers: int = 0


@dataclass(frozen=True)
class BuiltData:
    """Loaders for training, the report part for the final numbers, and the facts that go into the manifest."""

    module: TokenDataModule
    report: Dataset[dict[str, Tensor]]
    collate: Collate
    facts: dict[str, Any]


def build_data(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, seed: int
) -> BuiltData:
    """Datasets of the three parts. Raises ConfigError when sequences are longer than the model allows."""
    limit = getattr(model, "max_position_embeddings", None)
    if limit is not None and config.length > limit:
        raise ConfigError(
            f"data.length {config.length} exceeds the model's max_position_embeddings {limit}; "
            f"set data.length to at most {limit}"
        )
    documents = stdlib_documents()
    tokens = {
        part: join_documents(
            (d.text for d in documents if d.part == part),
            lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False),
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
        )
        for part in ("train", "select", "report")
    }
    train = TokenWindows(tokens["train"], config.length, config.stride)
    select = TokenWindows(tokens["select"], config.length)
    facts = {
        "name": "standard library", "python": sys.version.split()[0], "sha256": corpus_hash(documents),
        "tokens": {part: len(t) for part, t in tokens.items()},
    }  # fmt: skip
    module = TokenDataModule(train, select, config.batch_size, collate_windows, seed, config.workers)
    return BuiltData(module, TokenWindows(tokens["report"], config.length), collate_windows, facts)
