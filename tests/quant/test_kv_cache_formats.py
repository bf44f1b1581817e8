"""Formats of a cached vector against a reference of one vector at a time, their edges, their gradient."""

import pytest
import torch

from qdeepseek.quant.fp8 import E4M3_MAX, fake_quantize_e4m3
from qdeepseek.quant.kv_cache import CacheFormat, KVCacheScheme, fake_quantize_cache

E4M3 = sorted({(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)}
              | {m * 2.0**-9 for m in range(8)})  # fmt: skip
FORMATS = [
    CacheFormat("int8"), CacheFormat("int8", symmetric=False), CacheFormat("int8", 32, scale_dtype="float16"),
    CacheFormat("int4", 16), CacheFormat("int4", 32, symmetric=False, scale_dtype="float16"),
    CacheFormat("fp8"), CacheFormat("fp8", 16), CacheFormat("fp8", scale_dtype="bfloat16"),
    CacheFormat("fp8", static=True),
]  # fmt: skip


def nearest_e4m3(value: float) -> float:
    """The nearest of all E4M3 numbers, ties to the even code."""
    best = min(abs(abs(value) - level) for level in E4M3)
    ties = [i for i, level in enumerate(E4M3) if abs(abs(value) - level) == best]
    level = E4M3[next((i for i in ties if i % 2 == 0), ties[0])]
    return level if value >= 0 else -level


def naive_vector(v: torch.Tensor, form: CacheFormat) -> torch.Tensor:
    """x_hat of the elements that share a scale, in Python floats; the scale rounded to its dtype."""
    dtype = getattr(torch, form.scale_dtype)

    def served(s: float) -> float:
        info = torch.finfo(dtype)
        return max(float(torch.tensor(s, dtype=torch.float32).to(dtype)), 2.0**-24 if info.bits == 16 and
                   dtype == torch.float16 else info.tiny)  # fmt: skip

    values = v.tolist()
    if form.dtype == "fp8":
        s = 1.0 if form.static else served(max(abs(x) for x in values) / 448)
        return torch.tensor([nearest_e4m3(min(max(x / s, -448), 448)) * s for x in values])
    top = 127 if form.dtype == "int8" else 7
    if form.symmetric:
        s = served(max(abs(x) for x in values) / top)
        return torch.tensor([max(-top, min(top, round(x / s))) * s for x in values])
    lo, hi = min(0.0, *values), max(0.0, *values)
    s = served((hi - lo) / (2 * top + 1))
    zero = max(-top - 1, min(top, -top - 1 - round(lo / s)))
    return torch.tensor([max(-top - 1 - zero, min(top - zero, round(x / s))) * s for x in values])


def naive(x: torch.Tensor, form: CacheFormat) -> torch.Tensor:
    rows = x.reshape(-1, form.group_size or x.shape[-1])
    return torch.stack([naive_vector(row.float(), form) for row in rows]).view(x.shape)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f"{f.label} {f.scale_dtype}")
def test_equals_one_vector_at_a_time(form):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 64).transpose(1, 2) * torch.tensor([1.0, 1e-3, 300.0]).view(1, 1, 3, 1)
    x[0, 0, 0] = 0
    x[0, 1, 0] *= torch.tensor([100.0] + [1.0] * 63)  # an outlier
    x_hat = fake_quantize_cache(x, form)
    # one rounding of fp32 against fp64 in the division may move a tie: none of these values is one
    torch.testing.assert_close(x_hat, naive(x, form), rtol=1e-6, atol=0)
    assert torch.equal(fake_quantize_cache(x[1:, 1:, 2:], form), x_hat[1:, 1:, 2:])  # tokens and heads alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f"{f.label} {f.scale_dtype}")
def test_edges_are_finite_and_keep_dtype(form, dtype):
    info = torch.finfo(dtype)
    rows = [0.0, info.tiny, info.smallest_normal * info.eps, info.max, -info.max]
    x = torch.stack([torch.full((64,), r, dtype=dtype) for r in rows])
    x[3:, 1:] = 1.0  # and an outlier of the largest size beside ones
    x_hat = fake_quantize_cache(x, form)
    assert x_hat.dtype == dtype and x_hat.isfinite().all()
    assert torch.equal(x_hat[0], x[0])
    if not form.static and (form.scale_dtype != "float16" or dtype == torch.float16):  # else the scale saturates
        limit = torch.tensor(0.51 if form.dtype == "int4" else 0.13)
        assert ((x_hat[3:, 0].float() / x[3:, 0].float() - 1).abs() < limit).all()
    x[0, 0] = torch.inf
    assert fake_quantize_cache(x, form).isfinite().all() and fake_quantize_cache(x[:0], form).shape == (0, 64)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f"{f.label} {f.scale_dtype}")
def test_a_nan_stays_in_what_shares_its_scale(form):
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    x_hat = fake_quantize_cache(x, form)
    assert x_hat[1, 5].isnan()
    assert x_hat[[0, 2]].isfinite().all()


def test_e4m3_saturates_and_is_exact_on_its_own_numbers():
    levels = torch.tensor(E4M3)
    assert len(E4M3) == 127 and E4M3[-1] == E4M3_MAX
    static = fake_quantize_e4m3(torch.cat([levels, -levels]), static=True)
    assert torch.equal(static, torch.cat([levels, -levels]))
    beyond = torch.tensor([449.0, 464.0, 480.0, 1e9, -1e9, torch.inf])
    assert torch.equal(fake_quantize_e4m3(beyond, static=True), torch.tensor([448.0] * 4 + [-448.0, 448.0]))
    x_hat = fake_quantize_e4m3(levels)  # absmax 448: scale 1
    assert torch.equal(x_hat, levels)
    assert torch.equal(fake_quantize_e4m3(levels * 2**-30), levels * 2**-30)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f"{f.label} {f.scale_dtype}")
def test_gradient_is_straight_through(form):
    x = torch.randn(2, 3, 64, requires_grad=True)
    g = torch.randn(2, 3, 64)
    fake_quantize_cache(x, form).backward(g)
    assert torch.equal(x.grad, g)


def test_signal_to_noise_floors():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    floors = {"int8": 42, "fp8": 30, "int4": 15}
    for form in FORMATS:
        noise = (fake_quantize_cache(x, form) - x).square().sum()
        assert 10 * torch.log10(x.square().sum() / noise) > floors[form.dtype], form


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "bf16"}, "'bf16' is refused; use one of"),
        ({"group_size": 0}, "group_size: 0 is refused"),
        ({"dtype": "fp8", "symmetric": False}, "no zero point"),
        ({"static": True}, "a scale of 1 is for fp8"),
        ({"scale_dtype": "int8"}, "scale_dtype: 'int8' is refused"),
    ],
)
def test_meaningless_formats_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        CacheFormat(**values)


def test_schemes_round_trip_strictly():
    scheme = KVCacheScheme(CacheFormat("int4", 32, False), CacheFormat("fp8"))
    assert KVCacheScheme.from_dict(scheme.to_dict()) == scheme
    assert KVCacheScheme.from_dict({"cache": {"dtype": "fp8"}}) == KVCacheScheme(CacheFormat("fp8"))
    with pytest.raises(ValueError, match=r"unknown keys \['latent'\]"):
        KVCacheScheme.from_dict({"cache": {}, "latent": {}})
    with pytest.raises(ValueError, match="key cache is missing"):
        KVCacheScheme.from_dict({"rope": {}})
    with pytest.raises(ValueError, match=r"CacheFormat: 'int8' is refused"):
        KVCacheScheme.from_dict({"cache": "int8"})


def test_stored_bits():
    assert CacheFormat("int8").bits_per_value(128) == 8.25
    assert CacheFormat("int4", 32, False, scale_dtype="float16").bits_per_value(512) == 4.625
    assert CacheFormat("fp8", 128).bits_per_value(512) * 512 == 8 * 528  # 512 codes, four fp32 scales: fp8_ds_mla
    assert CacheFormat("fp8", static=True).bits_per_value(576) == 8


def test_groups_that_do_not_divide_name_those_that_do():
    CacheFormat("int4", 32).check_width(64, "x")
    with pytest.raises(
        ValueError, match="the latent has 96 elements, not a multiple of group_size 64; use group_size 32"
    ):
        CacheFormat("int4", 64).check_width(96, "the latent")
