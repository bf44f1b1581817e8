"""The arithmetic of the grid: scale from a range, codes from a weight, a weight from codes.

    codes = clamp(round_half_even(w / s) + z, qmin, qmax)        w_hat = (codes - z) * s

Everything is computed in fp32 (fp64 for fp64 input) and w_hat is rounded once, to the serving dtype if the scheme
names one, then to the dtype of w: a bf16 runtime, which multiplies an exact bf16 code by an exact bf16 scale,
gets the same bits.  `fake_quantize` is quantize followed by dequantize without the int8 detour, and equal to it.

Elements that share a scale are the last dimension of `w.reshape(*scale.shape, -1)`, for every granularity.
Shapes: w (O, I) or (E, O, I); scale, zero (.., O, G).
"""

import math
from typing import Any

import torch
from torch import Tensor

from qdeepseek.quant.scheme import QuantScheme


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def scale_bounds(scheme: QuantScheme, dtype: torch.dtype) -> tuple[float, float]:
    """(floor, ceiling) of a scale, exact in scale_dtype: no division by zero, no overflow of w_hat in `dtype`.

    The floor is the smallest normal number (fp16: the smallest subnormal, since fp16 normals end at 6e-5).
    """
    info = torch.finfo(scheme.torch_scale_dtype)
    floor = 2.0**-24 if scheme.scale_dtype == "float16" else info.tiny
    formats = [dtype] if scheme.torch_serve_dtype is None else [dtype, scheme.torch_serve_dtype]
    mantissa, exponent = math.frexp(min(torch.finfo(f).max for f in formats) / scheme.span)
    mantissa = math.floor(mantissa / info.eps * 2) * info.eps / 2  # down to a number that scale_dtype has
    return floor, min(math.ldexp(mantissa, exponent), info.max)


def round_scale(scale: Tensor, scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
    """The scale as served: rounded to scale_dtype, inside `scale_bounds`, in the compute dtype of `dtype`."""
    floor, ceiling = scale_bounds(scheme, dtype)
    return scale.to(scheme.torch_scale_dtype).to(compute_dtype(dtype)).clamp(floor, ceiling)


def scale_from_range(lo: Tensor, hi: Tensor, scheme: QuantScheme, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Range of each group -> (scale as served, integer zero point or None), for weights of `dtype`.

    lo, hi: (.., O, G), any float dtype.  Symmetric uses max(|lo|, |hi|).  Asymmetric widens the range to
    contain 0, so that 0 is exact; zero is int8 in [qmin, qmax].
    """
    lo, hi = lo.to(compute_dtype(dtype)), hi.to(compute_dtype(dtype))
    if scheme.symmetric:
        return round_scale(torch.maximum(hi, -lo).div_(scheme.divisor), scheme, dtype), None
    lo, hi = lo.clamp(max=0), hi.clamp(min=0)
    scale = round_scale((hi - lo).div_(scheme.divisor), scheme, dtype)  # an overflow ends at the ceiling
    zero = (scheme.qmin - (lo / scale).round_()).clamp_(scheme.qmin, scheme.qmax)
    return scale, zero.to(torch.int8)


def bounds(zero: Tensor | None, scheme: QuantScheme, dtype: torch.dtype) -> tuple[Any, Any]:
    """(qmin - zero, qmax - zero), the range of codes - zero: numbers, or tensors (.., O, G, 1) with a zero point."""
    if zero is None:
        return scheme.qmin, scheme.qmax
    zero = zero.to(dtype).unsqueeze(-1)
    return scheme.qmin - zero, scheme.qmax - zero


def _levels(w: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme) -> Tensor:
    """codes - zero as floats, blocked (*scale.shape, n).  `scale` is in the compute dtype."""
    levels = torch.div(w.reshape(*scale.shape, -1), scale.unsqueeze(-1)).round_()
    return levels.clamp_(*bounds(zero, scheme, scale.dtype))


def _restore(levels: Tensor, scale: Tensor, scheme: QuantScheme, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """levels * scale, consuming `levels`."""
    w_hat = levels.mul_(scale.unsqueeze(-1))
    if scheme.torch_serve_dtype is not None:
        w_hat = w_hat.to(scheme.torch_serve_dtype)
    return w_hat.to(dtype).view(shape)


@torch.no_grad()
def quantize(w: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme) -> Tensor:
    """Codes (int8, shape of w) of w on the grid of `scale` (taken as it is: `round_scale` it first)."""
    codes = _levels(w, scale.to(compute_dtype(w.dtype)), zero, scheme)
    if zero is not None:
        codes.add_(zero.unsqueeze(-1))
    return codes.to(torch.int8).view(w.shape)


@torch.no_grad()
def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight (shape of codes, `dtype`) that codes, scale and zero stand for."""
    scale = scale.to(compute_dtype(dtype))
    levels = codes.reshape(*scale.shape, -1).to(scale.dtype, copy=True)
    if zero is not None:
        levels.sub_(zero.unsqueeze(-1))
    return _restore(levels, scale, scheme, codes.shape, dtype)


def fake_quantize(w: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme) -> Tensor:
    """dequantize(quantize(w)) in one pass; `scale` in the compute dtype, as `round_scale` returns it.

    For the forward of an autograd.Function and other places without gradients.
    """
    return _restore(_levels(w, scale, zero, scheme), scale, scheme, w.shape, w.dtype)
