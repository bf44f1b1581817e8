"""The arithmetic of the grid: scale from a range, codes from a weight, a weight from codes.

    codes = clamp(round_half_even(w / s) + z, qmin, qmax)        w_hat = (codes - z) * s

Everything is computed in fp32 (fp64 for fp64 input) and w_hat is rounded once, to the serving dtype if the scheme
names one, then to the dtype of w: a bf16 runtime, which multiplies an exact bf16 code by an exact bf16 scale,
gets the same bits.  `fake_quantize` is quantize followed by dequantize without the int8 detour, and equal to it.

Elements that share a scale are the last dimension of `w.reshape(*scale.shape, -1)`, for every granularity.
Shapes: w (O, I) or (E, O, I); scale, zero (.., O, G).

Fused experts are one tensor of up to 10^10 elements. Fake-quant and its gradients go over a weight of more than PIECE
elements in pieces of whole groups, S of them in a flat row, so that temporaries are of the size of a piece.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qdeepseek.quant.scheme import QuantScheme

PIECE = 2**24  # 64 MiB in fp32: a GPU takes longer for one pass over it than for a kernel's launch


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
    """(qmin - zero, qmax - zero), the range of codes - zero: numbers, or tensors like zero."""
    if zero is None:
        return scheme.qmin, scheme.qmax
    zero = zero.to(dtype)
    return scheme.qmin - zero, scheme.qmax - zero


def blocked(w: Tensor, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """w as (*scale.shape, n); scale and zero with a last dimension of 1, so that they broadcast against it."""
    return w.reshape(*scale.shape, -1), scale.unsqueeze(-1), None if zero is None else zero.unsqueeze(-1)


def pieces(scale: Tensor, numel: int) -> Iterator[slice]:
    """Ranges of the flattened scale whose groups, of a weight of `numel` elements, make at most PIECE, or one group."""
    groups = scale.numel()
    step = max(1, PIECE * groups // max(1, numel))
    return (slice(start, start + step) for start in range(0, groups, step))


def flat(w: Tensor, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """w (S, n), scale and zero (S, 1): `blocked` with the groups in one row, to be cut by `pieces`."""
    return w.reshape(scale.numel(), -1), scale.reshape(-1, 1), None if zero is None else zero.reshape(-1, 1)


def cut(tensor: Tensor | None, piece: slice) -> Tensor | None:
    return None if tensor is None else tensor[piece]


def to_levels(blocks: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme) -> Tensor:
    """codes - zero as new floats, like blocks; scale, in the compute dtype, and zero broadcast."""
    return torch.div(blocks, scale).round_().clamp_(*bounds(zero, scheme, scale.dtype))


def from_levels(levels: Tensor, scale: Tensor, scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
    """levels * scale, rounded to the serving dtype and to `dtype`; consumes levels."""
    w_hat = levels.mul_(scale)
    serve = scheme.torch_serve_dtype
    if serve is not None and serve != dtype:
        w_hat = w_hat.copy_(w_hat.to(serve))
    return w_hat.to(dtype)


@torch.no_grad()
def quantize(w: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme) -> Tensor:
    """Codes (int8, shape of w) of w on the grid of `scale` (taken as it is: `round_scale` it first)."""
    blocks, scale, zero = blocked(w, scale.to(compute_dtype(w.dtype)), zero)
    codes = to_levels(blocks, scale, zero, scheme)
    if zero is not None:
        codes.add_(zero)
    return codes.to(torch.int8).view(w.shape)


@torch.no_grad()
def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight (shape of codes, `dtype`) that codes, scale and zero stand for."""
    levels, scale, zero = blocked(codes, scale.to(compute_dtype(dtype)), zero)
    levels = levels.to(scale.dtype, copy=True)
    if zero is not None:
        levels.sub_(zero)
    return from_levels(levels, scale, scheme, dtype).view(codes.shape)


def fake_quantize(w: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme) -> Tensor:
    """dequantize(quantize(w)) in one pass; `scale` in the compute dtype, as `round_scale` returns it.

    For the forward of an autograd.Function and other places without gradients.
    """
    if w.numel() <= PIECE:
        blocks, scale, zero = blocked(w, scale, zero)
        return from_levels(to_levels(blocks, scale, zero, scheme), scale, scheme, w.dtype).view(w.shape)
    w_hat = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    blocks_SN, scale_S1, zero_S1 = flat(w, scale, zero)
    for piece in pieces(scale, w.numel()):
        levels = to_levels(blocks_SN[piece], scale_S1[piece], cut(zero_S1, piece), scheme)
        w_hat.view(blocks_SN.shape)[piece] = from_levels(levels, scale_S1[piece], scheme, w.dtype)
    return w_hat
