"""Packing of B-bit codes into int32 words, as compressed-tensors' `pack-quantized` stores them.

    u_i = q_i + 2^(B-1)                         codes are signed, stored words hold them unsigned
    row = u_0 u_1 u_2 ...                       each B bits, least significant bit first, no padding between
    words = row cut into little-endian int32    the last filled with zeros: ceil(I·B / 32) words a row

Eight codes of B bits are exactly B bytes, for every B, so one routine serves 2, 3, 4 and 8 bits: collect
eight codes in an int64 and keep its low B bytes. For 4 bits this is eight nibbles a word, lowest first.

Weights are packed along the inputs I. Zero points of asymmetric schemes are packed along the outputs O
(`weight_zero_point`: ceil(O·B / 32) rows, one column for each group).

Legend: O out, I in, G groups, W words. Format: compressed-tensors 0.20, compressors/pack_quantized.
"""

import sys

import torch
from torch import Tensor

CODES_PER_UNIT = 8


def packed_width(columns: int, bits: int) -> int:
    """Number of int32 words that hold `columns` codes of `bits` bits."""
    return -(-columns * bits // 32)


def pack(codes_OI: Tensor, bits: int) -> Tensor:
    """Packs int8 codes (O, I) in [-2^(bits-1), 2^(bits-1) - 1] into int32 words (O, ceil(I·bits / 32))."""
    _check(codes_OI, torch.int8, bits)
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    smallest, largest = (int(v) for v in torch.aminmax(codes_OI)) if codes_OI.numel() else (0, 0)
    if smallest < low or largest > high:
        raise ValueError(
            f"codes span {smallest}..{largest}, but {bits}-bit codes lie in {low}..{high}; "
            "the codes belong to a scheme with other bits"
        )
    rows, columns = codes_OI.shape
    units = -(-columns // CODES_PER_UNIT)
    unsigned = torch.zeros(rows, units * CODES_PER_UNIT, dtype=torch.uint8, device=codes_OI.device)
    unsigned[:, :columns] = (codes_OI.to(torch.int16) - low).to(torch.uint8)
    unit = torch.zeros(rows, units, dtype=torch.int64, device=codes_OI.device)
    for k in range(CODES_PER_UNIT):
        unit |= unsigned[:, k::CODES_PER_UNIT].to(torch.int64) << bits * k
    width = packed_width(columns, bits)
    data = torch.zeros(rows, width * 4, dtype=torch.uint8, device=codes_OI.device)
    content = unit.view(torch.uint8).view(rows, units, 8)[:, :, :bits].reshape(rows, units * bits)
    used = min(data.shape[1], content.shape[1])
    data[:, :used] = content[:, :used]
    return data.view(torch.int32)


def unpack(words_OW: Tensor, bits: int, columns: int) -> Tensor:
    """Returns the int8 codes (O, columns) that `pack` stored in the int32 words (O, W)."""
    _check(words_OW, torch.int32, bits)
    rows, width = words_OW.shape
    if width != packed_width(columns, bits):
        raise ValueError(
            f"{width} int32 words a row do not hold {columns} codes of {bits} bits "
            f"({packed_width(columns, bits)} expected); weight_shape or num_bits in the config is wrong"
        )
    units = -(-columns // CODES_PER_UNIT)
    data = words_OW.contiguous().view(torch.uint8)
    content = torch.zeros(rows, units * bits, dtype=torch.uint8, device=words_OW.device)
    used = min(data.shape[1], content.shape[1])
    content[:, :used] = data[:, :used]
    padded = torch.zeros(rows, units, 8, dtype=torch.uint8, device=words_OW.device)
    padded[:, :, :bits] = content.view(rows, units, bits)
    unit = padded.view(torch.int64).squeeze(-1)
    codes = torch.empty(rows, units, CODES_PER_UNIT, dtype=torch.int8, device=words_OW.device)
    for k in range(CODES_PER_UNIT):
        codes[:, :, k] = (unit >> bits * k & (1 << bits) - 1) - (1 << bits - 1)
    return codes.view(rows, units * CODES_PER_UNIT)[:, :columns].contiguous()


def pack_zero_point(zero_OG: Tensor, bits: int) -> Tensor:
    """Packs zero points (O, G) along O into int32 words (ceil(O·bits / 32), G)."""
    return pack(zero_OG.t().contiguous(), bits).t().contiguous()


def unpack_zero_point(words_WG: Tensor, bits: int, rows: int) -> Tensor:
    """Returns the int8 zero points (rows, G) stored by `pack_zero_point`."""
    return unpack(words_WG.t().contiguous(), bits, rows).t().contiguous()


def _check(tensor: Tensor, dtype: torch.dtype, bits: int) -> None:
    if sys.byteorder != "little":
        # the format is little-endian words, and no big-endian host trains or serves these models
        raise NotImplementedError(
            f"packing views bytes as words; byte order {sys.byteorder} is not little: export on x86 or ARM"
        )
    if not 1 <= bits <= 8:
        raise ValueError(f"bits {bits} cannot be packed: compressed-tensors packs 1 to 8 bits")
    if tensor.ndim != 2 or tensor.dtype != dtype:
        raise ValueError(f"expected a 2-D {dtype} tensor, got {tensor.dtype} of shape {tuple(tensor.shape)}")
