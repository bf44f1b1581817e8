"""Relative errors over layers and parts of a network, as `metrics.json` holds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ErrorMap:
    """Relative errors, layers × parts; None where a layer has no such part (a dense layer has no experts)."""

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    error: tuple[tuple[float | None, ...], ...]

    @property
    def largest(self) -> float:
        return max((e for row in self.error for e in row if e is not None), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        error = [list(row) for row in self.error]
        return {"layers": list(self.layers), "parts": list(self.parts), "error": error}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ErrorMap":
        error = tuple(tuple(row) for row in values["error"])
        return cls(tuple(values["layers"]), tuple(values["parts"]), error)

    @classmethod
    def from_cells(cls, cells: Mapping[tuple[int, str], float]) -> "ErrorMap":
        """Layers ascending, parts in order of first appearance."""
        layers = tuple(sorted({layer for layer, _ in cells}))
        parts = tuple(dict.fromkeys(part for _, part in cells))
        return cls(layers, parts, tuple(tuple(cells.get((la, p)) for p in parts) for la in layers))
