"""Fake-quantisation to FP8 E4M3 (codes ±448, 3 bits of mantissa) with a scale for each vector or group of a vector.

    s = absmax(x) / 448        x_hat = e4m3(clamp(x / s, ±448)) · s        dL/dx = dL/dx_hat

Unlike an integer code an E4M3 code carries its own exponent: the error is relative, 2^-4 of the value at most, down
to s·2^-6; below that the codes are equally spaced by s·2^-9. `static` leaves the scale at 1, what a runtime uses that
was given none; values beyond 448 then saturate. The clamp is explicit: what a cast does out of range depends on the
version of torch. Finite and infinite x give finite x_hat; a NaN makes the elements NaN that share its scale.
Format: torch.float8_e4m3fn (OCP 8-bit floating point, no infinities).
"""

import math
from typing import Any

import torch
from torch import Tensor

from qdeepseek.quant.grid import compute_dtype

E4M3_MAX = 448.0


def e4m3_scale(absmax: Tensor, scale_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """absmax / 448 rounded to `scale_dtype`, kept where it is no division by zero and x_hat of `dtype` is finite."""
    info = torch.finfo(scale_dtype)
    floor = 2.0**-24 if scale_dtype == torch.float16 else info.tiny
    ceiling = 2.0 ** math.floor(math.log2(min(torch.finfo(dtype).max / E4M3_MAX, info.max)))
    return (absmax / E4M3_MAX).to(scale_dtype).to(compute_dtype(dtype)).clamp(floor, ceiling)


class _FakeQuantizeE4M3(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_size: int | None, scale_dtype: torch.dtype, static: bool) -> Tensor:
        blocks = (x if group_size is None else x.unflatten(-1, (-1, group_size))).to(compute_dtype(x.dtype))
        if static:
            codes = blocks.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            return codes.to(x.dtype).reshape(x.shape)
        scale = e4m3_scale(blocks.abs().amax(-1, keepdim=True), scale_dtype, x.dtype)
        codes = torch.div(blocks, scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return codes.to(scale.dtype).mul_(scale).to(x.dtype).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None


def fake_quantize_e4m3(
    x: Tensor, group_size: int | None = None, scale_dtype: torch.dtype = torch.float32, static: bool = False
) -> Tensor:
    """x_hat, like x (.., D): one scale for each vector of D, or for each `group_size` of it, or 1 with `static`."""
    return _FakeQuantizeE4M3.apply(x, group_size, scale_dtype, static)
