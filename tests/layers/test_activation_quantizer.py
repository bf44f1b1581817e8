"""ActivationQuantizer: the switch, refusals, and one x_hat for all layers that read x."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import qdeepseek.layers.activation_quantizer as module
from qdeepseek.layers import ActivationQuantizer, QuantLinear, WeightQuantizer
from qdeepseek.quant import QuantScheme, RangeMethod, fake_quantize_activation

A8 = QuantScheme(8, "per_token", scale_dtype="float32")
A4 = QuantScheme(4, "per_token", scale_dtype="float32")


@pytest.fixture
def computed(monkeypatch):
    calls = []
    monkeypatch.setattr(
        module, "fake_quantize_activation", lambda *args: calls.append(1) or fake_quantize_activation(*args)
    )
    return calls


def test_refuses_to_mix_tokens():
    with pytest.raises(ValueError, match="per_tensor"):
        ActivationQuantizer(QuantScheme(8, "per_tensor"))


def test_switch():
    quantizer, x = ActivationQuantizer(A8), torch.randn(3, 32)
    quantizer.enabled = False
    assert quantizer(x) is x


class GateUp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = (self.build(64) for _ in range(3))

    def build(self, size):
        linear = nn.Linear(64, size)
        quantizer = WeightQuantizer(QuantScheme(), RangeMethod(), linear.weight.shape)
        return QuantLinear.from_linear(linear, quantizer, ActivationQuantizer(A8))

    def forward(self, x):
        return self.down(self.gate(x).tanh() * self.up(x))


def gradients(run, x, model):
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def test_layers_share_one_x_hat(computed, monkeypatch):
    model, x = GateUp(), torch.randn(5, 64)
    shared = gradients(model, x, model)
    assert len(computed) == 2, "one for gate and up together, one for down"
    shared = [t.clone() for t in shared]
    monkeypatch.setattr(module.torch.compiler, "is_compiling", lambda: True)  # switches the sharing off
    for a, b in zip(gradients(model, x, model), shared, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(computed) == 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_sharing_under_checkpointing(reentrant):
    model, x = GateUp(), torch.randn(5, 64)
    expected = [t.clone() for t in gradients(model, x, model)]
    for a, b in zip(
        gradients(lambda x: checkpoint(model, x, use_reentrant=reentrant), x, model), expected, strict=True
    ):
        assert torch.equal(a, b)


def test_what_is_not_shared(computed):
    x = torch.randn(5, 64, requires_grad=True)
    with torch.no_grad():
        kept = ActivationQuantizer(A8)(x)
    x_hat = ActivationQuantizer(A8)(x)
    assert not kept.requires_grad and x_hat.requires_grad, "a result without graph must not be reused with one"
    four = ActivationQuantizer(A4)(x)
    assert torch.equal(four, fake_quantize_activation(x, A4)), "another scheme is another x_hat"
    with torch.no_grad():
        x.mul_(3)
    assert torch.equal(ActivationQuantizer(A8)(x), fake_quantize_activation(x, A8)), "x was changed in place"
    assert len(computed) == 4
    with torch.inference_mode():
        ActivationQuantizer(A8)(torch.randn(2, 64))


def test_nothing_is_kept_alive():
    before = len(module._shared)
    model, x = GateUp(), torch.randn(5, 64)
    gradients(model, x, model)
    assert len(module._shared) == before
