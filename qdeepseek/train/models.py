"""Models and tokenizers from a folder, a hub name or a fresh configuration, with errors that say what is wrong."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qdeepseek.surgery import autocast_experts, load_causal_lm
from qdeepseek.train.config import ConfigError
from qdeepseek.train.tokenizer import pretrained_byte_tokenizer

TINY = Path(__file__).parent.parent / "assets" / "tiny_deepseek_v3"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True)
class ModelConfig:
    """Where the model comes from.

    Exactly one of `path` (a `save_pretrained` folder, a hub name, or `tiny` for the shipped model) and
    `scratch` (arguments of the model's configuration class, with `model_type`) is set.

    expert_chunks: routed experts of a layer are trained in this many chunks, each gathered and fake-quantised by
    itself. For a model that is streamed into ZeRO-3 partitions (partitioned.py); whole ones have no use for it.
    """

    path: str | None = None
    scratch: Mapping[str, Any] | None = None
    dtype: str = "float32"
    revision: str | None = None
    gradient_checkpointing: bool = False
    attention: str = "sdpa"
    expert_chunks: int = 1

    def __post_init__(self) -> None:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("set exactly one of path and scratch")
        if self.attention not in ATTENTION:
            raise ValueError(
                f"attention {self.attention!r} is unknown; use one of {', '.join(ATTENTION)} (transformers' eager "
                f"attention adds a boolean mask to the scores, so packed documents would see each other)"
            )
        if type(self.expert_chunks) is not int or self.expert_chunks < 1:
            raise ValueError(f"expert_chunks {self.expert_chunks} must be a whole number, at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")

    @property
    def folder(self) -> str:
        return str(TINY) if self.path == "tiny" else str(self.path)


def load_model(config: ModelConfig) -> PreTrainedModel:
    """Build the model in `config.dtype`, in training mode off.

    Raises ConfigError when the checkpoint is missing, broken, incomplete or does not fit its configuration.
    """
    if config.scratch is not None:
        model = AutoModelForCausalLM.from_config(
            read_config(config), dtype=DTYPES[config.dtype], attn_implementation=config.attention
        )
    else:
        model = _from_pretrained(config)
    autocast_experts(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.eval()


def keeps_fp32(model: nn.Module, name: str) -> bool:
    """Whether the architecture keeps this parameter or buffer in fp32 beside a model in bf16 or fp16."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return f".{name}".endswith(tuple(f".{part}" for part in parts))


def checkpoint_folder(config: ModelConfig) -> Path:
    """Local folder of the checkpoint; a hub name is taken from the cache or downloaded first.

    Raises ConfigError naming the path and what is wrong with it.
    """
    where, local = f"model.path {config.folder}", Path(config.folder)
    if local.is_dir():
        return local
    if config.path == "tiny" or local.is_absolute() or config.folder.startswith("."):
        raise ConfigError(f"{where}: no such folder; give a save_pretrained folder or a hub name")
    try:
        return Path(snapshot_download(config.folder, revision=config.revision, ignore_patterns=["*.bin", "*.pth"]))
    except Exception as error:  # network, authorisation, cache and name errors all mean the same to the user
        raise ConfigError(
            f"{where}: neither a local folder nor a model that the hub or its cache has ({type(error).__name__}); "
            f"download it first and give the folder"
        ) from error


def _from_pretrained(config: ModelConfig) -> PreTrainedModel:
    where, folder = f"model.path {config.folder}", checkpoint_folder(config)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{where}: no config.json in it; give a folder written by save_pretrained")
    try:
        model, info = load_causal_lm(
            folder,
            dtype=DTYPES[config.dtype],
            attn_implementation=config.attention,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many kinds here; all mean the same to the user
        raise ConfigError(f"{where}: cannot be loaded ({type(error).__name__}: {error})") from error
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            names = ", ".join(str(n) for n in sorted(map(str, info[kind]))[:5])
            raise ConfigError(
                f"{where}: {len(info[kind])} {kind.replace('_', ' ')}, first {names}; the checkpoint is incomplete "
                f"or belongs to another configuration"
            )
    return model


def read_config(config: ModelConfig) -> PretrainedConfig:
    """The model's configuration alone."""
    if config.scratch is not None:
        values = dict(config.scratch)
        return AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoConfig.from_pretrained(checkpoint_folder(config))


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer; a fresh byte-level one for a model built from scratch."""
    if config.scratch is not None:
        return pretrained_byte_tokenizer(config.scratch["max_position_embeddings"])
    try:
        return AutoTokenizer.from_pretrained(checkpoint_folder(config))
    except Exception as error:
        raise ConfigError(
            f"model.path {config.folder}: its tokenizer cannot be loaded ({type(error).__name__}: {error})"
        ) from error
