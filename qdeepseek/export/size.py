"""Bytes of an export before anything is trained: what compressed_tensors.py would write, counted from shapes.

quantised (O, I), B bits, G scales   4 O ceil(I B / 32) packed + scale bytes + 16 of weight_shape,
                                     asymmetric: + 4 ceil(O B / 32) G packed zero points (1 byte per tensor)
kept                                 elements × bytes of the serving dtype; routers their own
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qdeepseek.export.entries import Entry
from qdeepseek.export.names import parts_of
from qdeepseek.export.packing import packed_width
from qdeepseek.quant import QuantScheme


@dataclass(frozen=True)
class ExportSize:
    """Bytes of the tensors of an export (safetensors headers, about 100 bytes a tensor, and small files excluded)."""

    codes: int = 0
    scales: int = 0
    zero_points: int = 0
    shapes: int = 0
    kept: int = 0
    tensors: int = 0

    @property
    def total(self) -> int:
        return self.codes + self.scales + self.zero_points + self.shapes + self.kept

    def __add__(self, other: "ExportSize") -> "ExportSize":
        return ExportSize(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values())))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def export_size(entries: Iterable[Entry], dtype: torch.dtype = torch.bfloat16) -> ExportSize:
    """Of the entries of a model, which may be on the meta device; without quantisers, of its plain weights."""
    return sum((_entry(entry, dtype) for entry in entries), ExportSize())


def _entry(entry: Entry, dtype: torch.dtype) -> ExportSize:
    shape = tuple(entry.tensor.shape)
    fused = entry.experts != [None]
    parts = len(parts_of(entry.parameter)) if fused else 1
    pieces = len(entry.experts) * parts
    if entry.quantized is None:
        return ExportSize(kept=entry.tensor.numel() * entry.kept_dtype(dtype).itemsize, tensors=pieces)
    rows = shape[-2] // parts
    one = packed(rows, shape[-1], entry.quantized.scheme)
    return ExportSize(*(pieces * value for value in asdict(one).values()))


def packed(rows: int, columns: int, scheme: QuantScheme) -> ExportSize:
    """One quantised matrix (rows, columns)."""
    scales = math.prod(scheme.scale_shape((rows, columns)))
    zero = 0
    if not scheme.symmetric:
        per_tensor = scheme.granularity == "per_tensor"
        zero = 1 if per_tensor else 4 * packed_width(rows, scheme.bits) * (scales // rows)
    return ExportSize(
        codes=4 * rows * packed_width(columns, scheme.bits),
        scales=scales * scheme.torch_scale_dtype.itemsize,
        zero_points=zero,
        shapes=16,
        tensors=3 + (not scheme.symmetric),
    )
