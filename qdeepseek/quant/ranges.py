"""The range (lo, hi) that a group's grid should cover: min-max, percentile, IQR fence, or least error.

All work on the blocked weight `w.reshape(*scale_shape, n)`, 2-D and 3-D alike, and return two tensors of scale_shape.
"""

import torch
from torch import Tensor

from qdeepseek.quant.grid import compute_dtype
from qdeepseek.quant.scheme import QuantScheme, RangeMethod


def min_max(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks.amin(-1), blocks.amax(-1)


@torch.no_grad()
def find_range(
    w: Tensor, scheme: QuantScheme, method: RangeMethod, scale_shape: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """(lo, hi) of every group of w by `method.kind`, in the compute dtype."""
    shape = scheme.scale_shape(w.shape) if scale_shape is None else scale_shape
    lo, hi = min_max(w.reshape(*shape, -1))
    return lo.to(compute_dtype(w.dtype)), hi.to(compute_dtype(w.dtype))
