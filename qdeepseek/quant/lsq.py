"""Learned step size (LSQ, Esser et al., arXiv 1902.08153), with the gradient scale taken per group.

With v = w / s, r = round_half_even(v), c = clamp(r, qmin - z, qmax - z), w_hat = c * s:
    dL/ds = g * sum over the group of dL/dw_hat * (c - v if r = c else c),   g = 1 / sqrt(n * qmax), n = group's size
    dL/dw = dL/dw_hat (`ste`), or that times [r = c] (`clipped`, as in the paper)
The served scale is the parameter rounded to scale_dtype and bounded away from zero; both straight-through, so a
scale pushed to zero or below keeps a finite gradient and can come back.  Only w, s, z are saved.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qdeepseek.quant import grid
from qdeepseek.quant.scheme import QuantScheme


class FakeQuantizeLSQ(torch.autograd.Function):
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
        scale = grid.round_scale(raw_scale, scheme, w.dtype)
        v = w.reshape(*scale.shape, -1) / scale.unsqueeze(-1)
        rounded = v.round()
        lo, hi = scheme.qmin, scheme.qmax
        if zero is not None:
            offset = zero.to(scale.dtype).unsqueeze(-1)
            lo, hi = lo - offset, hi - offset
        levels = rounded.clamp(lo, hi)
        outside = rounded != levels
        grad_scale = None
        if ctx.needs_input_grad[1]:
            blocked = grad.reshape(*scale.shape, -1)
            step = levels.sub_(v.masked_fill_(outside, 0)).mul_(blocked).sum(-1)
            grad_scale = step.mul_(1 / math.sqrt(v.shape[-1] * scheme.qmax)).to(raw_scale.dtype)
        grad_w = grad.masked_fill(outside.view(w.shape), 0) if ctx.clipped else grad
        return grad_w, grad_scale, None, None, None, None
