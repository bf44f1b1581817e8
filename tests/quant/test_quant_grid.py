"""The numeric contract, one battery for every scheme: bits x grid x granularity, and inside each test every weight
dtype, scale dtype, serve dtype and both ranks."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qdeepseek.quant import (
    QuantScheme,
    RangeMethod,
    dequantize,
    fake_quantize_weight,
    find_range,
    quantize,
    scale_from_range,
)
from qdeepseek.quant.grid import scale_bounds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((6, 64), (3, 4, 64))
GRIDS = {"full": {}, "narrow": {"grid": "narrow"}, "asymmetric": {"symmetric": False}}
BATTERY = [
    pytest.param(bits, grid, granularity, id=f"int{bits}-{grid}-{granularity}")
    for bits, grid, granularity in itertools.product((2, 3, 4, 8), GRIDS, ("per_tensor", "per_channel", "per_group"))
]
battery = pytest.mark.parametrize("bits, grid, granularity", BATTERY)


def schemes(bits, grid, granularity, scale_dtypes=("bfloat16", "float16", "float32"), serve=(None, "bfloat16")):
    for scale_dtype, serve_dtype in itertools.product(scale_dtypes, serve):
        yield QuantScheme(
            bits=bits, granularity=granularity, group_size=32, scale_dtype=scale_dtype, serve_dtype=serve_dtype,
            **GRIDS[grid],
        )  # fmt: skip


def weight(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts(w, scheme):
    """(codes, scale, zero) by min-max."""
    scale, zero = scale_from_range(*find_range(w, scheme, RangeMethod()), scheme, w.dtype)
    return quantize(w, scale, zero, scheme), scale, zero


def cases(bits, grid, granularity, **kwargs):
    return itertools.product(schemes(bits, grid, granularity, **kwargs), DTYPES, SHAPES)


@battery
def test_export_equals_fake_quant(bits, grid, granularity):
    for scheme, dtype, shape in cases(bits, grid, granularity):
        w = weight(shape, dtype)
        codes, scale, zero = parts(w, scheme)
        stored = scale.to(scheme.torch_scale_dtype)
        assert torch.equal(stored.to(scale.dtype), scale), "the scale in use is not the one that is stored"
        w_hat = fake_quantize_weight(w, scheme, RangeMethod())
        assert w_hat.dtype == dtype and w_hat.shape == w.shape
        assert torch.equal(dequantize(codes, stored, zero, scheme, dtype), w_hat)
        assert codes.dtype == torch.int8 and scheme.qmin <= codes.min() and codes.max() <= scheme.qmax
        if scheme.serve_dtype:
            assert torch.equal(w_hat.to(torch.bfloat16).to(dtype), w_hat) or dtype == torch.float16


@battery
def test_against_a_loop_in_python_floats(bits, grid, granularity):
    """The textbook, one weight at a time: Python's round is half to even, and its floats are fp64."""
    for scheme in schemes(bits, grid, granularity, scale_dtypes=("float32",), serve=(None,)):
        w = weight((4, 64), torch.float64, seed=1)
        codes, scale, zero = parts(w, scheme)
        w_hat = fake_quantize_weight(w, scheme, RangeMethod())
        n = w.numel() // scale.numel()
        triples = zip(w.flatten().tolist(), codes.flatten().tolist(), w_hat.flatten().tolist())
        for i, (x, code, x_hat) in enumerate(triples):
            group = w.flatten()[i // n * n : i // n * n + n].tolist()
            lo, hi = min(0, *group), max(0, *group)
            if scheme.symmetric:
                s, z = max(hi, -lo) / scheme.divisor, 0
            else:
                s = (hi - lo) / (scheme.qmax - scheme.qmin)
            s = torch.tensor(s).to(torch.float32).double().item()
            if not scheme.symmetric:
                z = max(scheme.qmin, min(scheme.qmax, scheme.qmin - round(lo / s)))
            expected = max(scheme.qmin, min(scheme.qmax, round(x / s) + z))
            assert code == expected
            assert x_hat == (expected - z) * s
            assert zero is None or zero.flatten()[i // n] == z


@battery
def test_error_is_at_most_half_a_step_inside_the_range(bits, grid, granularity):
    for scheme in schemes(bits, grid, granularity, scale_dtypes=("float32",), serve=(None,)):
        w = weight((4, 64), torch.float64)
        _, scale, _ = parts(w, scheme)
        error = (fake_quantize_weight(w, scheme, RangeMethod()) - w).reshape(*scale.shape, -1).abs()
        # asymmetric: the rounding of the zero point moves the range by up to half a step more
        bound = 1.0 if scheme.symmetric is False else 0.5
        assert (error <= bound * scale.unsqueeze(-1) * (1 + 1e-4)).all()  # the scale is fp32, the weight fp64


@battery
def test_every_code_is_reached_and_survives(bits, grid, granularity):
    """All codes x all positions in the group: quantize(dequantize(codes)) == codes, scale and zero given."""
    for scheme, dtype in itertools.product(schemes(bits, grid, granularity), DTYPES):
        levels = torch.arange(scheme.qmin, scheme.qmax + 1, dtype=torch.int8)
        width = 32 * math.ceil(len(levels) / 32)
        codes = torch.stack([levels.repeat(width)[i : i + width] for i in range(len(levels))])
        shape = scheme.scale_shape(codes.shape)
        scale = torch.rand(shape, generator=torch.Generator().manual_seed(2)).add(0.01).to(scheme.torch_scale_dtype)
        zero = None if scheme.symmetric else torch.randint(scheme.qmin, scheme.qmax + 1, shape, dtype=torch.int8)
        # a bf16 weight cannot tell apart 8-bit levels far from zero (up to 255 steps, 8 significant bits)
        if bits == 8 and not scheme.symmetric and torch.bfloat16 in (dtype, scheme.torch_serve_dtype):
            continue
        w_hat = dequantize(codes, scale, zero, scheme, dtype)
        assert torch.equal(quantize(w_hat, scale, zero, scheme), codes), (scheme, dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "per_group"])
def test_narrow_grid_is_idempotent(bits, granularity):
    for scheme, dtype, shape in cases(bits, "narrow", granularity):
        if bits == 8 and torch.bfloat16 in (dtype, scheme.torch_serve_dtype):
            continue  # 127 steps against bf16's 8 bits: absmax itself is rounded by up to a quarter step
        w = weight(shape, dtype, seed=3)
        codes, _, _ = parts(w, scheme)
        w_hat = fake_quantize_weight(w, scheme, RangeMethod())
        again, _, _ = parts(w_hat, scheme)
        assert torch.equal(again, codes), (scheme, dtype)
        if dtype == torch.float32 and scheme.serve_dtype is None and scheme.scale_dtype != "float32":
            assert torch.equal(fake_quantize_weight(w_hat, scheme, RangeMethod()), w_hat)


@battery
def test_three_dimensions_equal_stacked_two(bits, grid, granularity):
    for scheme, dtype in itertools.product(schemes(bits, grid, granularity), DTYPES):
        w = weight((3, 4, 64), dtype)
        stacked = [parts(one, scheme) for one in w]
        codes, scale, zero = parts(w, scheme)
        assert torch.equal(codes, torch.stack([c for c, _, _ in stacked]))
        assert torch.equal(scale, torch.stack([s for _, s, _ in stacked]))
        assert zero is None or torch.equal(zero, torch.stack([z for _, _, z in stacked]))
        w_hat = fake_quantize_weight(w, scheme, RangeMethod())
        assert torch.equal(w_hat, torch.stack([fake_quantize_weight(one, scheme, RangeMethod()) for one in w]))


def hard_weights(dtype):
    """Weights that break careless scales; all finite in `dtype`."""
    info = torch.finfo(dtype)
    w = torch.zeros(8, 64)
    w[1, 5] = 1000.0  # one outlier, the rest zero
    w[2] = torch.linspace(-1, 1, 64) * info.tiny * 0.25  # denormal
    w[3] = info.smallest_normal
    w[4] = torch.linspace(-1, 1, 64) * info.max  # the largest range there is
    w[5, :32], w[5, 32:] = -info.max, 1e-30
    w[6] = 3.0  # constant
    w[7, ::2] = -torch.rand(32, generator=torch.Generator().manual_seed(0))  # one sign only
    return w.to(dtype)


@battery
def test_hard_groups_stay_finite(bits, grid, granularity):
    for scheme, dtype in itertools.product(schemes(bits, grid, granularity, serve=(None, "float16")), DTYPES):
        for w in (hard_weights(dtype), torch.zeros(8, 64, dtype=dtype)):
            for gradient in ("ste", "clipped"):
                leaf = w.clone().requires_grad_()
                w_hat = fake_quantize_weight(leaf, scheme, RangeMethod(gradient=gradient))
                w_hat.backward(torch.ones_like(w_hat))
                assert w_hat.isfinite().all() and leaf.grad.isfinite().all(), (scheme, dtype)
            codes, scale, zero = parts(w, scheme)
            assert (scale > 0).all() and scale.isfinite().all()
            assert torch.equal(dequantize(codes, scale, zero, scheme, dtype), w_hat)
            assert not w_hat[0].any(), "a group of zeros must stay zero"


@battery
def test_scale_bounds_are_exact_and_tight(bits, grid, granularity):
    for scheme, dtype in itertools.product(schemes(bits, grid, granularity, serve=(None, "float16")), DTYPES):
        floor, ceiling = scale_bounds(scheme, dtype)
        both, stored = torch.tensor([floor, ceiling], dtype=torch.float64), torch.finfo(scheme.torch_scale_dtype)
        assert torch.equal(both.to(scheme.torch_scale_dtype).double(), both)
        largest = min(torch.finfo(f).max for f in (dtype, scheme.torch_serve_dtype or dtype))
        assert 0 < floor < ceiling and ceiling * scheme.span <= largest
        assert ceiling == stored.max or ceiling * scheme.span * (1 + 2 * stored.eps) > largest


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_ties_go_to_even(bits):
    scheme = QuantScheme(bits=bits, granularity="per_channel", scale_dtype="float32")
    halves = torch.arange(scheme.qmin, scheme.qmax).float() + 0.5
    codes = quantize(halves[None], torch.ones(1, 1), None, scheme)
    assert codes.flatten().tolist() == [round(x) for x in halves.tolist()]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scale_and_codes_are_those_of_compressed_tensors(bits, symmetric):
    """Independent oracle; its asymmetric rounding adds z before rounding, so ties of odd z are left out there."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    w = weight((16, 128), torch.float32, seed=5)
    scheme = QuantScheme(bits=bits, group_size=32, symmetric=symmetric, scale_dtype="float32")
    codes, scale, zero = parts(w, scheme)
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=32)
    blocks = w.view(16, 4, 32)
    ct_scale, ct_zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    assert torch.equal(scale, ct_scale)
    assert zero is None or torch.equal(zero, ct_zero.to(torch.int8))
    assert torch.equal(codes, ct_quantize(w, ct_scale, ct_zero, args).to(torch.int8))


def test_per_tensor_of_fused_experts_is_per_expert_and_half():
    scheme = QuantScheme(granularity="per_tensor", scale_dtype="float32")
    w = weight((2, 8, 64), torch.float32)
    w[1, 4:] *= 100
    lo, hi = find_range(w, scheme, RangeMethod(), scheme.scale_shape(w.shape, row_blocks=2))
    scale, _ = scale_from_range(lo, hi, scheme, w.dtype)
    expected = w.view(2, 2, 4 * 64).abs().amax(-1, keepdim=True) / 7.5
    assert torch.equal(scale, expected)


def test_not_contiguous_weight():
    scheme = QuantScheme(group_size=32)
    w = weight((64, 8), torch.float32).t()
    assert torch.equal(
        fake_quantize_weight(w, scheme, RangeMethod()), fake_quantize_weight(w.contiguous(), scheme, RangeMethod())
    )


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16),
    bits=st.sampled_from([2, 3, 4, 8]), grid=st.sampled_from([*GRIDS]), dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
)  # fmt: skip
def test_any_finite_weight(values, bits, grid, dtype, scale_dtype):
    scheme = QuantScheme(bits=bits, group_size=8, scale_dtype=scale_dtype, **GRIDS[grid])
    limit = torch.finfo(dtype).max
    w = torch.tensor(values).clamp(-limit, limit).to(dtype).view(1, 16)
    codes, scale, zero = parts(w, scheme)
    w_hat = fake_quantize_weight(w, scheme, RangeMethod())
    assert w_hat.isfinite().all()
    assert torch.equal(dequantize(codes, scale.to(scheme.torch_scale_dtype), zero, scheme, dtype), w_hat)
    assert scheme.qmin <= codes.min() and codes.max() <= scheme.qmax
