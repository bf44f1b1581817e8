"""Learned step size (LSQ, Esser et al., arXiv 1902.08153), with the gradient scale taken per group.

With v = w / s, r = round_half_even(v), c = clamp(r, qmin - z, qmax - z), w_hat = c * s:
    dL/ds = g * sum over the group of dL/dw_hat * (c - v if r = c else c),   g = 1 / sqrt(n * qmax)
    dL/dw = dL/dw_hat (`ste`), or that times [r = c] (`clipped`, as in the paper)
n being the number of weights in the group.  The served scale is the parameter rounded to scale_dtype and bounded
away from zero; both straight-through, so a scale pushed to zero or below keeps a finite gradient and can come back.
Only w, s and z are saved.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qdeepseek.quant import grid
from qdeepseek.quant.scheme import QuantScheme
from qdeepseek.quant.ste import steps


def scale_gradient(
    w: Tensor, raw_scale: Tensor, zero: Tensor | None, scheme: QuantScheme, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """dL/ds (.., O, G) and [r = c] as 0 or 1 (blocks of w), from w and dL/dw_hat `grad` (.., O, I)."""
    blocks, scale, zero = grid.blocked(w, grid.round_scale(raw_scale, scheme, w.dtype), zero)
    lo, hi = grid.bounds(zero, scheme, scale.dtype)
    v = steps(blocks, scale, lo, hi)
    rounded = v.round()
    levels = rounded.clamp(lo, hi)
    mask = rounded.eq_(levels)  # 1.0 where nothing was clamped, else 0.0
    step = levels.sub_(v.mul_(mask)).mul_(grad.reshape(v.shape)).sum(-1)
    return step.mul_(1 / math.sqrt(v.shape[-1] * scheme.qmax)).to(raw_scale.dtype), mask


class FakeQuantizeLSQ(torch.autograd.Function):
    """(w, raw scale parameter, zero, scheme, clipped, [w_hat if cached]) -> w_hat."""

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, clipped: bool,
        cached: list[Tensor],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(w, scale, zero)
        ctx.scheme, ctx.clipped = scheme, clipped
        if cached:
            return cached[0].detach()
        return grid.fake_quantize(w, grid.round_scale(scale, scheme, w.dtype), zero, scheme)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        w, raw_scale, zero = ctx.saved_tensors
        scheme, grad = ctx.scheme, grads[0]
        need_w, need_scale = ctx.needs_input_grad[:2]
        if not need_scale and not ctx.clipped:
            return grad, None, None, None, None, None
        grad_scale, mask = scale_gradient(w, raw_scale, zero, scheme, grad)
        grad_w = None
        if need_w:
            grad_w = mask.view(w.shape).mul_(grad).to(w.dtype) if ctx.clipped else grad
        return grad_w, grad_scale if need_scale else None, None, None, None, None
