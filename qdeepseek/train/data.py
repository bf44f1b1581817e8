"""From the `data` config group to datasets: the standard library's sources, or the user's text and chats."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from qdeepseek.data.corpus import corpus_hash, stdlib_documents
from qdeepseek.data.packing import collate_packed
from qdeepseek.data.sft import SftConfig, build_sft
from qdeepseek.data.windows import TokenWindows, collate_windows, join_documents
from qdeepseek.train.config import ConfigError, build
from qdeepseek.train.datamodule import Collate, TokenDataModule

Tokens = Dataset[dict[str, Tensor]]


@dataclass(frozen=True)
class LoaderConfig:
    """Batching, the same for every kind of data.

    `batch_size` is a micro-batch on one rank. `select_sequences` and `report_sequences` bound the held-out
    parts; the sequences are then spread evenly over them. `evaluate` is the part of the final numbers: report, or
    select where they decide something (an ablation), since nothing may be chosen on the report part.
    """

    batch_size: int = 8
    workers: int = 0
    select_sequences: int | None = None
    report_sequences: int | None = None
    evaluate: str = "report"

    def __post_init__(self) -> None:
        if self.evaluate not in ("report", "select"):
            raise ValueError(f"evaluate {self.evaluate!r} is unknown; use report or select")
        if self.batch_size < 1:
            raise ValueError(f"batch_size {self.batch_size} must be at least 1")


@dataclass(frozen=True)
class WindowConfig:
    """Windows of `length` tokens over the standard library, starting every `stride` tokens in training."""

    length: int = 256
    stride: int | None = None


@dataclass(frozen=True)
class DataConfig:
    """The `data` group: `kind` stdlib or sft, the loader's keys, and the keys of the kind."""

    loader: LoaderConfig
    source: WindowConfig | SftConfig

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "DataConfig":
        """Raises ConfigError on an unknown kind or key."""
        rest = dict(values)
        kind = rest.pop("kind", None)
        sources: dict[str, type[WindowConfig] | type[SftConfig]] = {"stdlib": WindowConfig, "sft": SftConfig}
        if kind not in sources:
            raise ConfigError(f"data.kind {kind!r} is unknown; use one of {', '.join(sources)}")
        loader = {f.name: rest.pop(f.name) for f in fields(LoaderConfig) if f.name in rest}
        return cls(build(LoaderConfig, loader, "data"), build(sources[kind], rest, "data"))


@dataclass(frozen=True)
class BuiltData:
    """The three parts as datasets, and the facts that go into the manifest.

    `report_tokens` and `select_tokens` are held-out parts as one vector where they are running text;
    `boundary` is the token that opens a document there, for intervals over documents.
    """

    train: Tokens
    select: Tokens
    report: Tokens
    length: int
    collate: Collate
    facts: dict[str, Any]
    loader: LoaderConfig
    seed: int
    report_tokens: Tensor | None = None
    select_tokens: Tensor | None = None
    boundary: int | None = None

    def module(self, start: int = 0) -> TokenDataModule:
        """Loaders whose training order begins at batch `start`."""
        select = spread(self.select, self.loader.select_sequences)
        return TokenDataModule(
            self.train, select, self.loader.batch_size, self.collate, self.seed, self.loader.workers, start,
            str(self.facts["sha256"]),
        )  # fmt: skip

    def calibration(self, sequences: int, device: torch.device | str = "cpu") -> list[dict[str, Tensor]]:
        """Training sequences for GPTQ, drawn with the run's seed, in batches of 8 on `device`."""
        generator = torch.Generator().manual_seed(self.seed)
        size = len(self.train)  # type: ignore[arg-type]
        items = [self.train[i] for i in torch.randperm(size, generator=generator)[:sequences].tolist()]
        batches = [self.collate(items[i : i + 8]) for i in range(0, len(items), 8)]
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]


def spread(data: Tokens, limit: int | None) -> Tokens:
    """At most `limit` items, evenly spread."""
    size = len(data)  # type: ignore[arg-type]
    if limit is None or limit >= size:
        return data
    return Subset(data, torch.linspace(0, size - 1, limit).round().long().tolist())


def build_data(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, seed: int, masks: bool = True
) -> BuiltData:
    """Datasets of the three parts, every row read and tokenised.

    masks: packed batches carry a (B, 1, L, L) mask; flash attention needs none, it reads the positions.

    Raises ConfigError or DataError when sequences are longer than the model allows, a part is empty or a row
    is malformed.
    """
    limit = getattr(model, "max_position_embeddings", None)
    if isinstance(config.source, SftConfig):
        return _sft(config.source, config.loader, tokenizer, limit, seed, masks)
    return _stdlib(config.source, config.loader, tokenizer, limit, seed)


def _sft(
    source: SftConfig,
    loader: LoaderConfig,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    seed: int,
    masks: bool,
) -> BuiltData:
    data = build_sft(source, tokenizer, limit)
    missing = [part for part in ("train", "select", "report") if part not in data.parts]
    if missing:
        raise ConfigError(
            f"data.fractions: part {', '.join(missing)} is empty; training needs train, the loss curve select, "
            f"and the final numbers report: give each a fraction above 0"
        )
    facts = {
        "name": source.path or source.name or "questions about the standard library",
        "sha256": data.data_hash,
        "rows": data.rows,
        "packing": {part: packed.stats.to_dict() for part, packed in data.parts.items()},
    }
    parts, collate = data.parts, partial(collate_packed, with_mask=masks)
    return BuiltData(
        parts["train"], parts["select"], parts["report"], parts["train"].length, collate, facts, loader, seed
    )


def _stdlib(
    source: WindowConfig, loader: LoaderConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int
) -> BuiltData:
    if limit is not None and source.length > limit:
        raise ConfigError(
            f"data.length {source.length} exceeds the model's max_position_embeddings {limit}; "
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
    facts = {
        "name": "standard library",
        "python": sys.version.split()[0],
        "sha256": corpus_hash(documents),
        "tokens": {part: len(t) for part, t in tokens.items()},
    }
    windows = {part: TokenWindows(t, source.length) for part, t in tokens.items()}
    return BuiltData(
        TokenWindows(tokens["train"], source.length, source.stride), windows["select"], windows["report"],
        source.length, collate_windows, facts, loader, seed, tokens["report"], tokens["select"],
        tokenizer.bos_token_id,
    )  # fmt: skip
