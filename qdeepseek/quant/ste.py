"""Straight-through gradients of weight fake-quant, as autograd.Functions that keep no copy of the weight.

Forward: w_hat = fake_quantize(w, s).  The scale follows from w, and straight-through treats it as a constant.
    ste      dL/dw = dL/dw_hat                                        (Bengio et al., arXiv 1308.3432): nothing saved
    clipped  dL/dw = dL/dw_hat where qmin <= round(w/s) + z <= qmax, else 0: saves w, s, z and recomputes the mask
Given `cached` (a w_hat computed from the same w and s before), the forward returns it instead of computing.
"""

from typing import Any

import torch
from torch import Tensor

from qdeepseek.quant import grid
from qdeepseek.quant.scheme import QuantScheme


def unclamped_mask(v: Tensor, zero: Tensor | None, scheme: QuantScheme) -> Tensor:
    """1 where round(v) + z lies in [qmin, qmax], else 0; v = w / s, blocked (*scale.shape, n)."""
    rounded = v.round()
    if zero is not None:
        rounded.add_(zero.unsqueeze(-1))
    return (rounded >= scheme.qmin).logical_and_(rounded <= scheme.qmax)


class FakeQuantizeSTE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, w: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, cached: list[Tensor]
    ) -> Tensor:
        return cached[0].detach() if cached else grid.fake_quantize(w, scale, zero, scheme)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None, None


class FakeQuantizeClipped(torch.autograd.Function):
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
        mask = unclamped_mask(w.reshape(*scale.shape, -1) / scale.unsqueeze(-1), zero, ctx.scheme)
        return grads[0] * mask.view(w.shape), None, None, None, None
