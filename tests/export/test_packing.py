"""Packing against compressed-tensors' own, bit for bit, for every code at every position in a word."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from qdeepseek.export.packing import pack, pack_zero_point, packed_width, unpack, unpack_zero_point

BITS = [2, 3, 4, 8]


def all_codes(bits: int) -> torch.Tensor:
    return torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=torch.int8)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_at_every_position(bits):
    """Row (c, p) holds code c at position p and another code elsewhere; 32 positions cover every straddle."""
    codes = all_codes(bits)
    for background in (codes[0], codes[-1], torch.tensor(0, dtype=torch.int8)):
        rows = background.repeat(len(codes), 32, 32)
        rows[:, torch.arange(32), torch.arange(32)] = codes[:, None]
        rows = rows.reshape(-1, 32)
        packed = pack(rows, bits)
        assert torch.equal(packed, pack_to_int32(rows, bits))
        assert torch.equal(unpack(packed, bits, 32), rows)
        assert torch.equal(unpack(packed, bits, 32), unpack_from_int32(packed, bits, rows.shape))


def test_int4_layout_is_eight_nibbles_lowest_first():
    word = pack(torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1]], dtype=torch.int8), 4)
    assert word.shape == (1, 1) and word.item() == 0x76543210


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [1, 7, 8, 31, 32, 33, 96, 130])
def test_ragged_widths(bits, columns):
    generator = torch.Generator().manual_seed(columns)
    codes = all_codes(bits)[torch.randint(0, 2**bits, (5, columns), generator=generator)]
    packed = pack(codes, bits)
    assert packed.shape == (5, packed_width(columns, bits))
    assert torch.equal(packed, pack_to_int32(codes, bits))
    assert torch.equal(unpack(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 8, 13, 64])
def test_zero_points_are_packed_along_the_outputs(bits, rows):
    generator = torch.Generator().manual_seed(rows)
    zero = all_codes(bits)[torch.randint(0, 2**bits, (rows, 3), generator=generator)]
    packed = pack_zero_point(zero, bits)
    assert torch.equal(packed, pack_to_int32(zero, bits, packed_dim=0))
    assert torch.equal(unpack_zero_point(packed, bits, rows), zero)


def test_wrong_input_is_refused():
    codes = torch.zeros(2, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"4-bit codes lie in -8\.\.7"):
        pack(codes + 8, 4)
    with pytest.raises(ValueError, match=r"expected a 2-D torch.int8 tensor, got torch.int32"):
        pack(codes.int(), 4)
    with pytest.raises(ValueError, match="do not hold 24 codes of 4 bits"):
        unpack(pack(codes, 4), 4, 24)
    with pytest.raises(ValueError, match="bits 9"):
        pack(codes, 9)
