"""How a weight lies on its grid, from at most `most` of its groups, evenly spaced; cheap enough while training.

    at_limits       share of codes at qmin or qmax
    error, square   mean (w_hat - w)^2 and mean w^2; sqrt(error / square) is the relative rounding error
    change          |s / s_0 - 1| of the sampled groups: mean and largest, s_0 an earlier sample of the same

A weight of billions of elements costs as much as one of 4096 groups, without a copy of the weight or of its scales.
Elements that share a scale are the last dimension of w.reshape(*scale.shape, -1), for every granularity.
Shapes: S sampled groups, n elements of a group; scale (.., O, G).
"""

import torch
from torch import Tensor

from qdeepseek.quant import grid
from qdeepseek.quant.scheme import QuantScheme

Sample = tuple[Tensor, Tensor, Tensor | None]  # blocks (S, n), scale (S, 1), zero (S, 1) or None


@torch.no_grad()
def sample_groups(w: Tensor, scale: Tensor, zero: Tensor | None, most: int) -> Sample:
    """Every k-th group of w with its served scale and zero point, k the smallest that leaves at most `most`."""
    stride = max(1, -(-scale.numel() // most))
    blocks = w.detach().reshape(scale.numel(), -1)[::stride]
    picked = [None if t is None else t.detach().reshape(-1, 1)[::stride] for t in (scale, zero)]
    assert picked[0] is not None
    return blocks, picked[0], picked[1]


@torch.no_grad()
def grid_statistics(sample: Sample, scheme: QuantScheme) -> Tensor:
    """(3,) in the dtype of the scale: at_limits, error, square."""
    blocks, scale, zero = sample
    lo, hi = grid.bounds(zero, scheme, scale.dtype)
    levels = grid.to_levels(blocks, scale, zero, scheme)
    at_limits = ((levels == lo) | (levels == hi)).to(scale.dtype).mean()
    w = blocks.to(scale.dtype)
    error = grid.from_levels(levels, scale, scheme, blocks.dtype).to(scale.dtype) - w
    return torch.stack([at_limits, error.square().mean(), w.square().mean()])


@torch.no_grad()
def scale_change(scale_S: Tensor, first_S: Tensor) -> Tensor:
    """(2,): mean and largest |s / s_0 - 1|."""
    change = (scale_S / first_S - 1).abs()
    return torch.stack([change.mean(), change.max()])
