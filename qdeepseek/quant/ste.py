"""Straight-through gradients of weight fake-quant, as autograd.Functions that keep no copy of the weight.

Forward: w_hat = fake_quantize(w, s).  The scale follows from w, and straight-through treats it as a constant.
    ste      dL/dw = dL/dw_hat (Bengio et al., arXiv 1308.3432); saves nothing
    clipped  dL/dw = dL/dw_hat where qmin <= round(w/s) + z <= qmax, else 0; saves w, s, z, recomputes the mask
Given a cached w_hat (computed from the same w and s before), the forward returns it instead of computing.
"""

from typing import Any

import torch
from torch import Tensor

from qdeepseek.quant import grid
from qdeepseek.quant.scheme import QuantScheme


def clamped(levels: Tensor, zero: Tensor | None, scheme: QuantScheme) -> Tensor:
    """True where round(w / s) (`levels`, blocked) lies outside of [qmin - z, qmax - z]."""
    if zero is None:
        return (levels < scheme.qmin).logical_or_(levels > scheme.qmax)
    zero = zero.to(levels.dtype).unsqueeze(-1)
    return (levels < scheme.qmin - zero).logical_or_(levels > scheme.qmax - zero)


class FakeQuantizeSTE(torch.autograd.Function):
    """(w, served scale, zero, scheme, [w_hat if cached]) -> w_hat."""

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, cached: list[Tensor]
    ) -> Tensor:
        return cached[0].detach() if cached else grid.fake_quantize(w, scale, zero, scheme)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None, None


class FakeQuantizeClipped(torch.autograd.Function):
    """(w, served scale, zero, scheme, [w_hat if cached]) -> w_hat."""

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, cached: list[Tensor]
    ) -> Tensor:
        ctx.save_for_backward(w, scale, zero)
        ctx.scheme = scheme
        return cached[0].detach() if cached else grid.fake_quantize(w, scale, zero, scheme)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        w, scale, zero = ctx.saved_tensors
        levels = (w.reshape(*scale.shape, -1) / scale.unsqueeze(-1)).round_()
        outside = clamped(levels, zero, ctx.scheme).view(w.shape)
        return grads[0].masked_fill(outside, 0), None, None, None, None
