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
        grad_w = torch.empty(w.shape, dtype=w.dtype, device=w.device)
        blocks_SN, scale_S1, zero_S1 = grid.flat(w, scale, zero)
        grad_SN = grads[0].reshape(blocks_SN.shape)
        for piece in grid.pieces(scale, w.numel()):
            lo, hi = grid.bounds(grid.cut(zero_S1, piece), ctx.scheme, scale.dtype)
            rounded = steps(blocks_SN[piece], scale_S1[piece], lo, hi).round_()
            mask = rounded.eq_(rounded.clamp(lo, hi))  # 1.0 or 0.0: multiplies faster than a bool
            grad_w.view(blocks_SN.shape)[piece] = mask.mul_(grad_SN[piece])
        return grad_w, None, None, None, None
