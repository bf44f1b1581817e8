"""Tensors of the source checkpoint that the model does not have, passed through as they are.

DeepSeek-V3 stores its multi-token-prediction module as a layer after the last one; transformers does not load it,
a runtime with speculative decoding wants it. FP8 weights among them come out in bf16, since the export has no FP8
scheme.
"""

from pathlib import Path

import torch
from torch import Tensor

from qdeepseek.export.checkpoint import Checkpoint

DROPPED = (".rotary_emb.inv_freq",)  # computed from the config; old checkpoints stored it


class Extras:
    """What `source` holds beyond the names in `known`; nothing without a source or without safetensors in it."""

    def __init__(self, source: Path | None, known: set[str]):
        self._checkpoint: Checkpoint | None = None
        self.names: list[str] = []
        if source is None or not any(source.glob("*.safetensors")):
            return
        self._checkpoint = Checkpoint(source)
        packed = next((name for name in self._checkpoint if name.endswith(".weight_packed")), None)
        if packed is not None:
            raise ValueError(f"{source} is quantised already ({packed}); give the original checkpoint as source")
        missing = [name for name in known if name not in self._checkpoint]
        if len(missing) == len(known):
            raise ValueError(
                f"{source} shares no tensor name with the model (which has {missing[0]}); is it its checkpoint?"
            )
        self.names = [n for n in self._checkpoint if n not in known and not n.endswith(DROPPED)]

    @property
    def nbytes(self) -> int:
        infos = [self._checkpoint.info(name) for name in self.names] if self._checkpoint else []
        return sum(i.nbytes * (2 if i.dtype == torch.float8_e4m3fn else 1) for i in infos)

    @property
    def modules(self) -> list[str]:
        """Modules with a 2-D weight."""
        if self._checkpoint is None:
            return []
        weights = [name for name in self.names if name.endswith(".weight")]
        return [n.removesuffix(".weight") for n in weights if len(self._checkpoint.info(n).shape) == 2]

    def read(self, name: str) -> Tensor:
        assert self._checkpoint is not None
        return self._checkpoint.read(name)
