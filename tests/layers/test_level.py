"""Levels of a quantiser: the forward, its gradient, the cache, and what a checkpoint keeps."""

import pytest
import torch
from torch import nn

from qdeepseek.layers import LEVELS, ActivationQuantizer, QuantLinear, WeightQuantizer, ladder, scheme_at
from qdeepseek.layers.rematerialise import rematerialise
from qdeepseek.quant import QuantScheme, RangeMethod, dequantize, fake_quantize_activation, fake_quantize_weight

METHODS = {
    "minmax": RangeMethod(), "mse": RangeMethod(kind="mse", mse_grid=8), "lsq": RangeMethod(learned=True),
    "clipped": RangeMethod(kind="mse", mse_grid=8, learned=True, gradient="clipped"),
}  # fmt: skip
A4 = QuantScheme(4, "per_token", scale_dtype="float32")


def build(scheme, method, w):
    quantizer = WeightQuantizer(scheme, METHODS[method], w.shape)
    quantizer.initialize(w)
    return quantizer


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "per_group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_min_max_of_the_same_granularity(method, symmetric, granularity, dtype):
    scheme = QuantScheme(4, granularity, 32, symmetric=symmetric, serve_dtype="bfloat16")
    for shape in ((4, 64), (2, 4, 64)):
        w = torch.randn(shape).to(dtype)
        quantizer = build(scheme, method, w)
        quantizer.level = "int8"
        eight = scheme_at(scheme, "int8")
        assert (eight.bits, eight.granularity, eight.group_size) == (8, granularity, scheme.group_size)
        w_hat = quantizer(w)
        assert torch.equal(w_hat, fake_quantize_weight(w, eight, RangeMethod()))
        codes, scale, zero = quantizer.quantize(w)
        assert torch.equal(dequantize(codes, scale, zero, eight, dtype), w_hat)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("serve", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("level", ["int8", "bf16"])
def test_gradient_passes_and_the_learned_scale_waits(method, serve, level):
    w = torch.randn(4, 64, requires_grad=True)
    quantizer = build(QuantScheme(serve_dtype=serve), method, w)
    quantizer.level = level
    w_hat = quantizer(w)
    if level == "bf16":
        expected = w if serve is None else w.to(getattr(torch, serve)).float()
        assert torch.equal(w_hat, expected)
        with pytest.raises(ValueError, match="bf16 has no codes"):
            quantizer.quantize(w)
    grad = torch.randn(4, 64)
    w_hat.backward(grad)
    assert torch.equal(w.grad, grad)
    if METHODS[method].learned:  # zeros, not None: DDP counts on every parameter
        assert torch.equal(quantizer.scale.grad, torch.zeros_like(quantizer.scale))
    quantizer.level = "target"
    again = build(QuantScheme(serve_dtype=serve), method, w)
    assert torch.equal(quantizer(w), again(w))


def test_a_deferred_scale_waits_too():
    w = nn.Parameter(torch.randn(4, 64))
    quantizer = build(QuantScheme(), "lsq", w)
    quantizer.defer, quantizer.level = True, "int8"
    quantizer(w).square().sum().backward()
    assert quantizer.scale.grad is None
    quantizer.set_scale_grad(w)
    assert torch.equal(quantizer.scale.grad, torch.zeros_like(quantizer.scale))


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_computes_as_it_did(level):
    layer = QuantLinear.from_linear(
        nn.Linear(64, 4), build(QuantScheme(), "lsq", torch.randn(4, 64)), ActivationQuantizer(A4)
    )
    plain = [*layer.state_dict()]
    layer.weight_quantizer.level = layer.input_quantizer.level = level
    state = layer.state_dict()
    assert ([*state] == plain) == (level == "target")
    fresh = QuantLinear.from_linear(
        nn.Linear(64, 4), build(QuantScheme(), "lsq", torch.randn(4, 64)), ActivationQuantizer(A4)
    )
    fresh.weight_quantizer.level = "int8"  # a state without a level means target
    fresh.load_state_dict(state)
    x = torch.randn(3, 64)
    assert fresh.weight_quantizer.level == fresh.input_quantizer.level == level
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize("method", ["minmax", "lsq"])
def test_the_cache_and_recomputation_follow_the_level(method):
    layer = QuantLinear.from_linear(nn.Linear(64, 4), build(QuantScheme(), method, torch.randn(4, 64)))
    quantizer, found = layer.weight_quantizer, {}
    for cache, recompute in ((False, False), (True, False), (False, True)):
        quantizer.cache, quantizer.recompute = cache, recompute
        for level in (*LEVELS, *LEVELS):
            quantizer.level = level
            w_hat = quantizer(layer.weight)
            assert quantizer._memo is None or torch.equal(quantizer._memo.w_hat, w_hat)
            assert torch.equal(found.setdefault(level, w_hat), w_hat)
            x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
            layer(x).square().sum().backward()
            assert torch.equal(found.setdefault((level, "grad"), x.grad), x.grad)
    assert len({float(found[level].detach().sum()) for level in LEVELS}) == 3


def test_a_level_set_between_forward_and_backward_is_loud():
    layer = QuantLinear.from_linear(nn.Linear(64, 4), build(QuantScheme(), "minmax", torch.randn(4, 64)))
    quantizer = layer.weight_quantizer
    quantizer.recompute = True
    x = torch.randn(2, 64, requires_grad=True)
    w_hat = quantizer(layer.weight)
    with rematerialise((quantizer, layer.weight, w_hat)):
        y = torch.nn.functional.linear(x, w_hat)
    quantizer.level = "bf16"
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        y.sum().backward()


def test_inputs_follow_the_level():
    quantizer, x = ActivationQuantizer(A4), torch.randn(3, 32, requires_grad=True)
    assert torch.equal(quantizer(x), fake_quantize_activation(x, A4))
    quantizer.level = "int8"
    assert torch.equal(quantizer(x), fake_quantize_activation(x, scheme_at(A4, "int8")))
    quantizer.level = "bf16"
    assert quantizer(x) is x


def test_ladders():
    assert ladder(4) == ladder(2) == ("target", "int8", "bf16") and ladder(8) == ("target", "bf16")
    assert scheme_at(A4, "target") is A4 and scheme_at(A4, "bf16") is None
