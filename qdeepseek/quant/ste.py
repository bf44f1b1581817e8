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


def steps(blocks: Tensor, scale: Tensor, lo: Any, hi: Any) -> Tensor:
    """w / s, cut one step outside of the grid [lo, hi]: finite for any scale, and still outside when rounded."""
    return torch.div(blocks, scale).clamp_(lo - 1, hi + 1)


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
        blocks, scale, zero = grid.blocked(w, scale, zero)
        lo, hi = grid.bounds(zero, ctx.scheme, scale.dtype)
        rounded = steps(blocks, scale, lo, hi).round_()
        mask = rounded.eq_(rounded.clamp(lo, hi)).view(w.shape)  # 1.0 or 0.0: multiplies faster than a bool
        return mask.mul_(grads[0]).to(w.dtype), None, None, None, None
