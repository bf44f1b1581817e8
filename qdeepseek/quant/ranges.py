"""The range (lo, hi) that a group's grid should cover: min-max, percentile, IQR fence, or least error.

    minmax       lo = min w, hi = max w
    percentile   symmetric: hi = -lo = the p-th percentile of |w|; asymmetric: the (100 - p)-th and p-th of w
    iqr          the min-max range cut at the fences Q1 - f * IQR and Q3 + f * IQR (Tukey)
    mse          r * min-max with the r of a grid in [mse_min_ratio, 1] that minimises sum |w - w_hat|^mse_norm;
                 of equal errors the widest range wins

A percentile or fence that leaves nothing (a group of zeros with a few weights) falls back to min-max, as it would
erase the group.  All work on the blocked weight `w.reshape(*scale_shape, n)`, 2-D and 3-D alike; temporaries are
bounded by working on slices of groups.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qdeepseek.quant import grid
from qdeepseek.quant.scheme import QuantScheme, RangeMethod

SLICE = 2**23  # elements per slice: sort and search need several temporaries of this size, not of the weight's

Range = tuple[Tensor, Tensor]


def min_max(blocks: Tensor) -> Range:
    """(lo, hi) over the last dimension."""
    return blocks.amin(-1), blocks.amax(-1)


def _quantile(ascending: Tensor, q: float) -> Tensor:
    """Linear interpolation between order statistics, as torch.quantile, which stops at 16 M elements."""
    position = q * (ascending.shape[-1] - 1)
    below = int(position)
    above = min(below + 1, ascending.shape[-1] - 1)
    return torch.lerp(ascending[..., below], ascending[..., above], position - below)


def percentile_range(blocks: Tensor, scheme: QuantScheme, method: RangeMethod) -> Range:
    q = method.percentile / 100
    if scheme.symmetric:
        hi = _quantile(blocks.abs().sort(-1).values, q)
        return -hi, hi
    ascending = blocks.sort(-1).values
    return _quantile(ascending, 1 - q), _quantile(ascending, q)


def iqr_range(blocks: Tensor, scheme: QuantScheme, method: RangeMethod) -> Range:
    ascending = blocks.sort(-1).values
    q1, q3 = _quantile(ascending, 0.25), _quantile(ascending, 0.75)
    reach = method.iqr_factor * (q3 - q1)
    return torch.maximum(ascending[..., 0], q1 - reach), torch.minimum(ascending[..., -1], q3 + reach)


def mse_range(blocks: Tensor, scheme: QuantScheme, method: RangeMethod) -> Range:
    full_lo, full_hi = min_max(blocks)
    best_ratio = torch.ones_like(full_hi)
    best_error = torch.full_like(full_hi, torch.inf)
    for ratio in torch.linspace(1, method.mse_min_ratio, method.mse_grid).tolist():
        scale, zero = grid.scale_from_range(full_lo * ratio, full_hi * ratio, scheme, blocks.dtype)
        w_hat = grid.fake_quantize(blocks, scale, zero, scheme)
        error = w_hat.sub_(blocks).abs_().pow_(method.mse_norm).sum(-1)
        better = error < best_error
        best_ratio.masked_fill_(better, ratio)
        best_error = torch.where(better, error, best_error)
    return full_lo * best_ratio, full_hi * best_ratio


_SEARCHES: dict[str, Callable[[Tensor, QuantScheme, RangeMethod], Range]] = {
    "percentile": percentile_range,
    "iqr": iqr_range,
    "mse": mse_range,
}


@torch.no_grad()
def find_range(
    w: Tensor, scheme: QuantScheme, method: RangeMethod, scale_shape: tuple[int, ...] | None = None
) -> Range:
    """(lo, hi) of every group of w by `method.kind`; both of scale_shape, in the compute dtype of w.

    scale_shape: default `scheme.scale_shape(w.shape)`.
    """
    shape = scheme.scale_shape(w.shape) if scale_shape is None else scale_shape
    dtype = grid.compute_dtype(w.dtype)
    blocks = w.reshape(*shape, -1)
    lo, hi = (bound.to(dtype) for bound in min_max(blocks))
    if method.kind == "minmax":
        return lo, hi
    search = _SEARCHES[method.kind]
    rows = blocks.flatten(0, -2)
    slices = rows.split(max(1, SLICE // rows.shape[-1]))
    found = [search(part.to(dtype), scheme, method) for part in slices]
    new_lo, new_hi = (torch.cat(bounds).view(shape) for bounds in zip(*found, strict=True))
    empty = (new_lo == 0) & (new_hi == 0)
    return torch.where(empty, lo, new_lo), torch.where(empty, hi, new_hi)
