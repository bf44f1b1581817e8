"""QuantLinear, QuantEmbedding, ActivationQuantizer: numerics by their readable form, sharing, reversibility."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qdeepseek.layers import ActivationQuantizer, QuantEmbedding, QuantLinear, WeightQuantizer
from qdeepseek.quant import QuantScheme, RangeMethod, dequantize, fake_quantize_activation

W4 = QuantScheme(group_size=32)
A8 = QuantScheme(8, "per_token", scale_dtype="float32")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("input_scheme", [None, A8, QuantScheme(4, "per_token", symmetric=False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_linear_of_dequantised(bias, input_scheme, dtype):
    linear = nn.Linear(64, 32, bias=bias, dtype=dtype)
    weight_quantizer = WeightQuantizer(W4, RangeMethod(), linear.weight.shape)
    layer = QuantLinear.from_linear(
        linear, weight_quantizer, None if input_scheme is None else ActivationQuantizer(input_scheme)
    )
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    y = layer(x)
    codes, scale, zero = weight_quantizer.quantize(layer.weight)
    w_hat = dequantize(codes, scale, zero, W4, dtype)
    x_hat = x if input_scheme is None else fake_quantize_activation(x, input_scheme)
    assert torch.equal(y, F.linear(x_hat, w_hat, linear.bias))

    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(x.grad, F.linear(grad, w_hat.t()))
    flat = grad.flatten(0, 1).t().contiguous()
    torch.testing.assert_close(linear.weight.grad, flat @ x_hat.detach().flatten(0, 1))


def test_from_linear_shares_and_to_linear_returns():
    linear = nn.Linear(64, 32).eval()
    layer = QuantLinear.from_linear(linear, WeightQuantizer(W4, RangeMethod(), linear.weight.shape))
    assert layer.weight is linear.weight and layer.bias is linear.bias and not layer.training
    assert {*layer.state_dict()} == {"weight", "bias"}, "min-max has no state of its own"
    back = layer.to_linear()
    assert type(back) is nn.Linear and back.weight is linear.weight and back.bias is linear.bias


def test_linear_refuses_a_parametrised_weight():
    linear = nn.Linear(64, 32)
    nn.utils.parametrizations.weight_norm(linear)
    with pytest.raises(ValueError, match="quantise first"):
        QuantLinear.from_linear(linear, WeightQuantizer(W4, RangeMethod(), (32, 64)))


def test_input_quantizer_switch():
    layer = QuantLinear.from_linear(
        nn.Linear(64, 8), WeightQuantizer(W4, RangeMethod(), (8, 64)), ActivationQuantizer(A8)
    )
    x = torch.randn(3, 64)
    layer.input_quantizer.enabled = layer.weight_quantizer.enabled = False
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_looks_up_the_quantised_table(padding_idx):
    embedding = nn.Embedding(10, 64, padding_idx=padding_idx)
    quantizer = WeightQuantizer(QuantScheme(8, "per_channel"), RangeMethod(), embedding.weight.shape)
    layer = QuantEmbedding.from_embedding(embedding, quantizer)
    ids = torch.tensor([[1, 2, 2], [9, 0, 1]])
    codes, scale, zero = quantizer.quantize(layer.weight)
    y = layer(ids)
    assert torch.equal(y, dequantize(codes, scale, zero, quantizer.scheme)[ids])
    y.sum().backward()
    expected = torch.bincount(ids.flatten(), minlength=10).float()
    if padding_idx is not None:
        expected[padding_idx] = 0
    assert torch.equal(embedding.weight.grad, expected[:, None].expand(10, 64))
    back = layer.to_embedding()
    assert type(back) is nn.Embedding and back.weight is embedding.weight and back.padding_idx == padding_idx


def test_embedding_refuses_max_norm():
    embedding = nn.Embedding(10, 64, max_norm=1.0)
    with pytest.raises(ValueError, match=r"max_norm 1\.0"):
        QuantEmbedding.from_embedding(embedding, WeightQuantizer(W4, RangeMethod(), (10, 64)))


@pytest.mark.slow
@pytest.mark.parametrize("method", [RangeMethod(), RangeMethod(gradient="clipped"), RangeMethod(learned=True)])
def test_compiles_into_one_graph(method):
    """torch.compile without a break, and with the same bits (traced, not fused)."""
    linear = nn.Linear(64, 32)
    quantizer = WeightQuantizer(W4, method, linear.weight.shape)
    quantizer.initialize(linear.weight)
    layer = QuantLinear.from_linear(linear, quantizer, ActivationQuantizer(A8))
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        y = run(torch.ones(3, 64))
        y.sum().backward()
        results.append((y.detach(), linear.weight.grad.clone()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
