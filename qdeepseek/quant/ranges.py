"""The range (lo, hi) that a group's grid should cover: min-max, percentile, IQR fence, or least error.

    minmax       lo = min w, hi = max w
    percentile   symmetric: the p-th percentile of |w|; asymmetric: the (100 - p)-th and the p-th of w
    iqr          min-max cut at the fences Q1 - f * IQR and Q3 + f * IQR (Tukey)
    mse          r * min-max with the r of a grid in [mse_min_ratio, 1] that minimises sum |w - w_hat|^mse_norm;
                 of equal errors the widest range wins

All but the first are expressed as a ratio of the min-max range, (low, high), which a quantiser can keep while the
weight moves.  A percentile or fence that leaves nothing (a group of zeros with a few weights) gives ratio 1, as it
would erase the group.  Everything works on the blocked weight `w.reshape(*scale_shape, n)`, 2-D and 3-D alike;
temporaries are bounded by working on slices of groups.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qdeepseek.quant import grid
from qdeepseek.quant.scheme import QuantScheme, RangeMethod

SLICE = 2**23  # elements per slice: sort and search need several temporaries of this size, not of the weight's

Pair = tuple[Tensor, Tensor]


def min_max(blocks: Tensor, keepdim: bool = False) -> Pair:
    """(lo, hi) over the last dimension."""
    if blocks.is_cpu:  # torch's half-precision reductions are four times slower here than fp32 with the cast
        blocks = blocks.to(grid.compute_dtype(blocks.dtype))
    return blocks.amin(-1, keepdim), blocks.amax(-1, keepdim)


def _quantile(ascending: Tensor, q: float) -> Tensor:
    """Linear interpolation between order statistics, as torch.quantile, which stops at 16 M elements."""
    position = q * (ascending.shape[-1] - 1)
    below = int(position)
    above = min(below + 1, ascending.shape[-1] - 1)
    return torch.lerp(ascending[..., below], ascending[..., above], position - below)


def _share_of_min_max(lo: Tensor, hi: Tensor, blocks: Tensor, symmetric: bool) -> Pair:
    full_lo, full_hi = min_max(blocks)
    empty = (lo == 0) & (hi == 0)
    if symmetric:
        lo = hi = torch.maximum(hi, -lo)
        full_lo = full_hi = torch.maximum(full_hi, -full_lo)
    low, high = (torch.where(empty | (full == 0), 1, part / full) for part, full in ((lo, full_lo), (hi, full_hi)))
    return low, high


def percentile_ratio(blocks: Tensor, scheme: QuantScheme, method: RangeMethod) -> Pair:
    q = method.percentile / 100
    if scheme.symmetric:
        hi = _quantile(blocks.abs().sort(-1).values, q)
        return _share_of_min_max(-hi, hi, blocks, True)
    ascending = blocks.sort(-1).values
    return _share_of_min_max(_quantile(ascending, 1 - q), _quantile(ascending, q), blocks, False)


def iqr_ratio(blocks: Tensor, scheme: QuantScheme, method: RangeMethod) -> Pair:
    ascending = blocks.sort(-1).values
    q1, q3 = _quantile(ascending, 0.25), _quantile(ascending, 0.75)
    reach = method.iqr_factor * (q3 - q1)
    lo, hi = torch.maximum(ascending[..., 0], q1 - reach), torch.minimum(ascending[..., -1], q3 + reach)
    return _share_of_min_max(lo, hi, blocks, scheme.symmetric)


def mse_ratio(blocks: Tensor, scheme: QuantScheme, method: RangeMethod) -> Pair:
    lo, hi = min_max(blocks)
    best_ratio = torch.ones_like(hi)
    best_error = torch.full_like(hi, torch.inf)
    for ratio in torch.linspace(1, method.mse_min_ratio, method.mse_grid).tolist():
        scale, zero = grid.scale_from_range(lo * ratio, hi * ratio, scheme, blocks.dtype)
        w_hat = grid.fake_quantize(blocks, scale, zero, scheme)
        error = w_hat.sub_(blocks).abs_().pow_(method.mse_norm).sum(-1)
        better = error < best_error
        best_ratio.masked_fill_(better, ratio)
        best_error = torch.where(better, error, best_error)
    return best_ratio, best_ratio


_RATIOS: dict[str, Callable[[Tensor, QuantScheme, RangeMethod], Pair]] = {
    "percentile": percentile_ratio,
    "iqr": iqr_ratio,
    "mse": mse_ratio,
}


@torch.no_grad()
def clip_ratio(w: Tensor, scheme: QuantScheme, method: RangeMethod, scale_shape: tuple[int, ...]) -> Pair | None:
    """(low, high), each of scale_shape: the range of `method.kind` is (low * min w, high * max w). None for minmax."""
    if method.kind == "minmax":
        return None
    rows = w.reshape(*scale_shape, -1).flatten(0, -2)
    slices = rows.split(max(1, SLICE // rows.shape[-1]))
    search, dtype = _RATIOS[method.kind], grid.compute_dtype(w.dtype)
    found = [search(part.to(dtype), scheme, method) for part in slices]
    low, high = (torch.cat(ratios).view(scale_shape) for ratios in zip(*found, strict=True))
    return low, high


@torch.no_grad()
def find_range(
    w: Tensor,
    scheme: QuantScheme,
    method: RangeMethod,
    scale_shape: tuple[int, ...] | None = None,
    ratio: Pair | None = None,
) -> Pair:
    """(lo, hi) of every group of w; both of scale_shape, in the compute dtype of w.

    scale_shape: default `scheme.scale_shape(w.shape)`.  ratio: a `clip_ratio` found before; default: found now.
    """
    shape = scheme.scale_shape(w.shape) if scale_shape is None else scale_shape
    lo, hi = (bound.to(grid.compute_dtype(w.dtype)) for bound in min_max(w.reshape(*shape, -1)))
    if ratio is None:
        ratio = clip_ratio(w, scheme, method, shape)
    return (lo, hi) if ratio is None else (lo * ratio[0], hi * ratio[1])
