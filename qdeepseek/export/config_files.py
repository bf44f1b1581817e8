"""The files of an export beside the weights: config.json, generation config, tokenizer, chat template.

config.json is the model's own with the serving dtype and `quantization_config`. The rest is copied from the source
checkpoint byte for byte, or written by the objects in memory where there is no source.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from qdeepseek.export.writer import write_json

COPIED = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.jinja",
    "chat_template*", "generation_config.json", "preprocessor_config.json", "processor_config.json", "LICENSE*",
)  # fmt: skip


def write_config(model: nn.Module, folder: Path, dtype: str, quantization: dict[str, Any]) -> None:
    """Writes config.json for a model that is served in `dtype`."""
    config: Any = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # of the source, such as FP8
        del config.quantization_config
    config.save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content.pop("torch_dtype", None)
    content["architectures"] = content.get("architectures") or [type(model).__name__]
    content["dtype"] = dtype
    content["quantization_config"] = quantization
    write_json(path, content)


def write_companions(model: nn.Module, folder: Path, source: Path | None, tokenizer: Any = None) -> None:
    """Copies or writes the files a runtime needs besides weights and config.

    tokenizer  an object with `save_pretrained`, which then replaces the source's tokenizer files
    """
    if source is not None:
        patterns = [*COPIED, "*.py"] if hasattr(model.config, "auto_map") else list(COPIED)
        for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and not (folder / "generation_config.json").exists():
        generation.save_pretrained(folder)
