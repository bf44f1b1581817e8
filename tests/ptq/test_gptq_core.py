"""The column walk against a float64 reference that inverts the remaining Hessian anew at every column."""

import pytest
import torch
from torch import Tensor

from qdeepseek.ptq.gptq_core import GPTQConfig, gptq_quantize, inverse_factor, output_error
from qdeepseek.quant.grid import dequantize, quantize, scale_from_range
from qdeepseek.quant.ranges import find_range
from qdeepseek.quant.scheme import QuantScheme, RangeMethod

OUT, IN, TOKENS = 12, 48, 256
SCHEMES = [
    QuantScheme(bits=bits, granularity=granularity, group_size=16, symmetric=symmetric, grid=grid)
    for bits in (2, 3, 4, 8)
    for granularity in ("per_group", "per_channel")
    for symmetric, grid in ((True, "full"), (True, "narrow"), (False, "full"))
]
CONFIGS = [
    GPTQConfig(block=16, scales="current", act_order=False),
    GPTQConfig(block=20, scales="current", act_order=False),
    GPTQConfig(block=24, act_order=False),
    GPTQConfig(block=24),
]


def ids(scheme: QuantScheme) -> str:
    return f"{scheme.bits}-{scheme.granularity}-{'asym' if not scheme.symmetric else scheme.grid}"


def problem(seed: int = 0, experts: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A weight and the Hessian of correlated inputs, some of them large."""
    g = torch.Generator().manual_seed(seed)
    lead = (experts,) if experts else ()
    w = torch.randn(*lead, OUT, IN, generator=g, dtype=torch.float64)
    x = torch.randn(*lead, TOKENS, 24, generator=g, dtype=torch.float64)
    x = x @ torch.randn(*lead, 24, IN, generator=g, dtype=torch.float64)
    x = x + 0.3 * torch.randn(*lead, TOKENS, IN, generator=g, dtype=torch.float64)
    x[..., 5] *= 6
    return w.to(dtype), (x.mT @ x / TOKENS).to(dtype)


def naive(w: Tensor, hessian: Tensor, scheme: QuantScheme, config: GPTQConfig) -> tuple[Tensor, Tensor]:
    """(codes, scale): optimal brain quantisation (arXiv 2208.11580) in a fixed order, an inverse a column."""
    w, size = w.clone(), w.shape[1]
    group = scheme.group_size or size
    order = torch.arange(size)
    if config.act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    hessian = hessian + config.damp * hessian.diagonal().mean() * torch.eye(size, dtype=w.dtype)
    scale, zero = scale_from_range(*find_range(w, scheme, RangeMethod()), scheme, w.dtype)
    codes = torch.zeros(w.shape, dtype=torch.int8)
    for k in range(size):
        i, rest, g = order[k], order[k:], int(order[k]) // group
        if config.scales == "current" and group < size and k % group == 0:
            fit = scale_from_range(*find_range(w[:, k : k + group], scheme, RangeMethod()), scheme, w.dtype)
            scale[:, g : g + 1] = fit[0]
            if zero is not None:
                zero[:, g : g + 1] = fit[1]
        z = 0 if zero is None else zero[:, g].double()
        code = torch.clamp(torch.round(w[:, i] / scale[:, g]) + z, scheme.qmin, scheme.qmax)
        codes[:, i] = code.to(torch.int8)
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        error = (w[:, i] - (code - z) * scale[:, g]) / inverse[0, 0]
        w[:, rest] -= error[:, None] * inverse[0]
    return codes, scale


@pytest.mark.parametrize("config", CONFIGS, ids=["current", "block20", "original", "act_order"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=ids)
def test_equals_the_naive_reference(scheme, config):
    w, hessian = problem()
    codes, scale, _ = gptq_quantize(w, hessian, scheme, config=config)
    want_codes, want_scale = naive(w, hessian, scheme, config)
    assert torch.equal(codes, want_codes)
    assert torch.equal(scale, want_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS, ids=["current", "block20", "original", "act_order"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=ids)
def test_beats_rounding_and_is_a_fixed_point(scheme, config, dtype):
    w, hessian = problem(seed=1, dtype=torch.float32)
    w = w.to(dtype)
    codes, scale, zero = gptq_quantize(w, hessian, scheme, config=config)
    w_hat = dequantize(codes, scale, zero, scheme, dtype)
    if scheme.span * torch.finfo(dtype).eps < 1:  # 255 levels do not survive bfloat16's 8 significant bits
        assert torch.equal(quantize(w_hat, scale, zero, scheme), codes)
    assert codes.min() >= scheme.qmin and codes.max() <= scheme.qmax
    rtn_scale, rtn_zero = scale_from_range(*find_range(w, scheme, RangeMethod()), scheme, dtype)
    rounded = dequantize(quantize(w, rtn_scale, rtn_zero, scheme), rtn_scale, rtn_zero, scheme, dtype)
    bar = 0.5 if dtype == torch.float32 else 1.0  # at 8 bits bfloat16 itself is the larger error
    assert output_error(w, w_hat, hessian) < bar * output_error(w, rounded, hessian)


@pytest.mark.parametrize("config", CONFIGS, ids=["current", "block20", "original", "act_order"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_experts_equal_their_slices(symmetric, config):
    scheme = QuantScheme(bits=4, group_size=16, symmetric=symmetric)
    w, hessian = problem(experts=3)
    fused = gptq_quantize(w, hessian, scheme, config=config)
    for e in range(3):
        for whole, one in zip(fused, gptq_quantize(w[e], hessian[e], scheme, config=config)):
            assert (whole is None and one is None) or torch.equal(whole[e], one)


def test_per_tensor_with_a_scale_for_gate_and_for_up():
    scheme = QuantScheme(bits=4, granularity="per_tensor")
    w, hessian = problem(experts=2)
    w[:, OUT // 2 :] *= 9
    codes, scale, _ = gptq_quantize(w, hessian, scheme, scale_shape=(2, 2, 1))
    halves = [gptq_quantize(h, hessian, scheme) for h in w.chunk(2, dim=1)]
    assert torch.equal(codes, torch.cat([h[0] for h in halves], dim=1))
    assert torch.equal(scale, torch.cat([h[1] for h in halves], dim=1))


def test_no_data_or_a_diagonal_hessian_is_rounding_to_nearest():
    scheme = QuantScheme(bits=4, group_size=16)
    w, _ = problem()
    scale, zero = scale_from_range(*find_range(w, scheme, RangeMethod()), scheme, w.dtype)
    rounded = quantize(w, scale, zero, scheme)
    for hessian in (torch.zeros(IN, IN), torch.diag(torch.rand(IN) + 0.1)):
        assert torch.equal(gptq_quantize(w, hessian, scheme)[0], rounded)


def test_dead_columns_are_rounded_and_disturb_nothing():
    scheme = QuantScheme(bits=4, granularity="per_channel")
    w, hessian = problem()
    dead = torch.tensor([0, 7, IN - 1])
    w[:, dead] *= 0.1  # so that they do not set the row's range
    hessian[dead], hessian[:, dead] = 0, 0
    alive = torch.tensor([i for i in range(IN) if i not in dead.tolist()])
    codes, scale, _ = gptq_quantize(w, hessian, scheme)
    assert torch.equal(codes[:, dead], quantize(w[:, dead], scale, None, scheme))
    assert output_error(w, dequantize(codes, scale, None, scheme, w.dtype), hessian) < 0.01
    moved = w.clone()
    moved[:, dead] *= 0.5
    assert torch.equal(gptq_quantize(moved, hessian, scheme)[0][:, alive], codes[:, alive])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factor_inverts_the_damped_hessian(dtype):
    _, hessian = problem(experts=2, dtype=dtype)
    upper = inverse_factor(hessian, 0.01)
    mean = hessian.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    damped = (hessian / mean).double() + 0.01 * torch.eye(IN, dtype=torch.float64)
    assert torch.equal(upper, upper.triu())
    residual = upper.double().mT @ upper.double() @ damped - torch.eye(IN, dtype=torch.float64)
    plain = torch.linalg.inv(damped.to(dtype)).double() @ damped - torch.eye(IN, dtype=torch.float64)
    assert residual.abs().max() <= 2 * plain.abs().max() + torch.finfo(dtype).eps * IN


def test_damping_grows_only_for_the_expert_that_needs_it(caplog):
    _, hessian = problem(experts=2, dtype=torch.float32)
    bad = hessian.clone()
    values, vectors = torch.linalg.eigh(bad[1])
    values[0] = -0.05 * bad[1].diagonal().mean()
    bad[1] = vectors * values @ vectors.mT
    upper = inverse_factor(bad, 0.01, "layers.1.experts.down_proj")
    assert torch.isfinite(upper).all()
    assert torch.equal(upper[0], inverse_factor(hessian, 0.01)[0])
    assert "layers.1.experts.down_proj" in caplog.text and "0.1" in caplog.text


def test_bad_input_is_refused():
    scheme = QuantScheme(bits=4, group_size=16)
    w, hessian = problem()
    with pytest.raises(ValueError, match=r"head: the Hessian holds NaN"):
        gptq_quantize(w, hessian * float("nan"), scheme, name="head")
    with pytest.raises(ValueError, match="multiple of group_size"):
        gptq_quantize(w[:, :40], hessian[:40, :40], scheme, name="head")
    with pytest.raises(ValueError, match="not positive definite"):
        inverse_factor(torch.diag(torch.tensor([1.0, -0.5])), 1e-9)
    for wrong in ({"damp": 0}, {"block": 0}, {"scales": "best"}, {"scales": "current"}):
        with pytest.raises(ValueError, match="GPTQ"):
            GPTQConfig(**wrong)
