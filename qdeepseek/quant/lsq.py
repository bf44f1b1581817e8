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


def gradients(
    w: Tensor, raw_scale: Tensor, zero: Tensor | None, scheme: QuantScheme, grad: Tensor, clipped: bool = False
) -> tuple[Tensor, Tensor | None]:
    """dL/ds (.., O, G), and dL/dw (.., O, I) if `clipped`, from w and dL/dw_hat `grad` (.., O, I)."""
    scale = grid.round_scale(raw_scale, scheme, w.dtype)
    if w.numel() <= grid.PIECE:
        blocks, scale, zero = grid.blocked(w, scale, zero)
        grad_scale, grad_w = _of_piece(blocks, scale, zero, scheme, grad.reshape(blocks.shape), clipped)
        return grad_scale.to(raw_scale.dtype), None if grad_w is None else grad_w.view(w.shape)
    blocks_SN, scale_S1, zero_S1 = grid.flat(w, scale, zero)
    grad_SN = grad.reshape(blocks_SN.shape)
    total = torch.empty(raw_scale.shape, dtype=raw_scale.dtype, device=w.device)
    masked = torch.empty(w.shape, dtype=w.dtype, device=w.device) if clipped else None
    for piece in grid.pieces(scale, w.numel()):
        own = blocks_SN[piece], scale_S1[piece], grid.cut(zero_S1, piece)
        step, grad_w = _of_piece(*own, scheme, grad_SN[piece], clipped)
        total.view(-1)[piece] = step
        if masked is not None and grad_w is not None:
            masked.view(blocks_SN.shape)[piece] = grad_w
    return total, masked


def _of_piece(
    blocks: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, grad: Tensor, clipped: bool
) -> tuple[Tensor, Tensor | None]:
    """`gradients` of weights (.., n) in groups, the scale's in its compute dtype."""
    lo, hi = grid.bounds(zero, scheme, scale.dtype)
    v = steps(blocks, scale, lo, hi)
    rounded = v.round()
    levels = rounded.clamp(lo, hi)
    mask = rounded.eq_(levels)  # 1.0 where nothing was clamped, else 0.0
    step = levels.sub_(v.mul_(mask)).mul_(grad).sum(-1)
    step.mul_(1 / math.sqrt(v.shape[-1] * scheme.qmax))
    return step, mask.mul_(grad).to(blocks.dtype) if clipped else None


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
        grad_scale, grad_w = gradients(w, raw_scale, zero, scheme, grad, ctx.clipped)
        if not ctx.clipped:
            grad_w = grad
        return grad_w if need_w else None, grad_scale if need_scale else None, None, None, None, None
