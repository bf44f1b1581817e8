"""The level of a quantiser: its target scheme, or more bits for a while.

    target   the scheme of the recipe
    int8     the same granularity and grid in 8 bits; the scale is the min-max of the tensor
    bf16     no codes: a weight is rounded to serve_dtype (if the scheme names one), an input stays as it is

Level and forward change at once, so a level may be set only between a backward and the next forward. It is a Python
attribute, which costs no sync, and part of the state dict where it is not `target`: a checkpoint computes as it did.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from qdeepseek.quant import QuantScheme

Level = Literal["target", "int8", "bf16"]
LEVELS: tuple[Level, ...] = ("target", "int8", "bf16")


def ladder(bits: int) -> tuple[Level, ...]:
    """Levels that differ for a target of this many bits, lowest first."""
    return LEVELS if bits < 8 else ("target", "bf16")


def scheme_at(scheme: QuantScheme, level: Level) -> QuantScheme | None:
    """What a tensor with target `scheme` is served as at `level`; None: unquantised."""
    if level == "bf16":
        return None
    return scheme if level == "target" or scheme.bits >= 8 else replace(scheme, bits=8)


class Levelled(nn.Module):
    """A module with a level, saved as `level` (int8, index in LEVELS) where it is not `target`."""

    level: Level = "target"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.level != "target":
            destination[prefix + "level"] = torch.tensor(LEVELS.index(self.level), dtype=torch.int8)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.pop(prefix + "level", None)
        self.level = "target" if saved is None else LEVELS[int(saved)]
        super()._load_from_state_dict(state_dict, prefix, *args)
