"""Fake-quantisation of a weight and of an activation: the two operations that a quantised layer runs.

Weights: w_hat = fake_quantize(w, s) with s from `RangeMethod` or given; gradients by `ste`, `clipped` or LSQ.
Activations: each token x (.., I) gets its own range at run time (dynamic); the gradient is straight-through,
since a min-max range clips nothing beyond half a step.  A token of zeros stays zero.
"""

from typing import Any

import torch
from torch import Tensor

from qdeepseek.quant import grid
from qdeepseek.quant.lsq import FakeQuantizeLSQ
from qdeepseek.quant.ranges import find_range, min_max
from qdeepseek.quant.scheme import QuantScheme, RangeMethod
from qdeepseek.quant.ste import FakeQuantizeClipped, FakeQuantizeSTE


def fake_quantize_weight(
    w: Tensor,
    scheme: QuantScheme,
    method: RangeMethod,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    cached: Tensor | None = None,
) -> Tensor:
    """w_hat with the shape and dtype of w (O, I) or (E, O, I).

    scale: None: found from w by `method`; else (.., O, G), and with `method.learned` it gets the LSQ gradient.
    zero: int8, shape of scale; needed with a given scale when the scheme is asymmetric.
    cached: a w_hat of this same w and scale, returned instead of being computed; gradients are unaffected.
    """
    if scale is None:
        with torch.no_grad():
            scale, zero = grid.scale_from_range(*find_range(w, scheme, method), scheme, w.dtype)
    elif method.learned:
        memo = [] if cached is None else [cached]
        return FakeQuantizeLSQ.apply(w, scale, zero, scheme, method.gradient == "clipped", memo)
    else:
        scale = grid.round_scale(scale.detach(), scheme, w.dtype)
    return fake_quantize_served(w, scheme, method, scale, zero, cached)


def fake_quantize_served(
    w: Tensor,
    scheme: QuantScheme,
    method: RangeMethod,
    scale: Tensor,
    zero: Tensor | None = None,
    cached: Tensor | None = None,
) -> Tensor:
    """`fake_quantize_weight` for a scale that is not learned and comes from `scale_from_range` or `round_scale`."""
    function = FakeQuantizeClipped if method.gradient == "clipped" else FakeQuantizeSTE
    return function.apply(w, scale, zero, scheme, [] if cached is None else [cached])


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, idle: Tensor | None, made: list[Tensor]) -> Tensor:
        ctx.idle = None if idle is None else (idle.shape, idle.dtype, idle.device)
        return made[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.idle is None or not ctx.needs_input_grad[1]:
            return grads[0], None, None
        shape, dtype, device = ctx.idle
        return grads[0], torch.zeros(shape, dtype=dtype, device=device), None


def straight_through(w: Tensor, w_hat: Tensor, idle: Tensor | None = None) -> Tensor:
    """w_hat, made from w, with w's gradient passed on; `idle` gets zeros: unused, but seen by DDP as used."""
    return _StraightThrough.apply(w, idle, [w_hat])


class _FakeQuantizeActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scheme: QuantScheme) -> Tensor:
        if not x.numel():
            return x.clone()
        blocks = x if scheme.group_size is None else x.unflatten(-1, (-1, scheme.group_size))
        lo, hi = min_max(blocks, keepdim=True)
        scale, zero = grid.scale_from_range(lo, hi, scheme, x.dtype)
        levels = grid.to_levels(blocks, scale, zero, scheme)
        return grid.from_levels(levels, scale, scheme, x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def fake_quantize_activation(x: Tensor, scheme: QuantScheme) -> Tensor:
    """x_hat, like x (.., I): dynamic ranges per token or per group of a token, straight-through gradient."""
    return _FakeQuantizeActivation.apply(x, scheme)
