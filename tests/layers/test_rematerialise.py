"""`recompute`: the same gradients bit for bit, no w_hat among the saved tensors, and a loud error when it cannot."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV3Config
from transformers.integrations import moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from qdeepseek.layers import (
    ActivationQuantizer,
    QuantLinear,
    WeightQuantizer,
    attach_expert_quantizers,
    quant_experts_forward,
)
from qdeepseek.quant import QuantScheme, RangeMethod

METHODS = {"minmax": RangeMethod(), "lsq": RangeMethod(learned=True, gradient="clipped")}


def quantizer(w, method, recompute):
    made = WeightQuantizer(QuantScheme(), method, w.shape)
    made.initialize(w)
    made.recompute = recompute
    return made


class Linears(nn.Module):
    def __init__(self, method, recompute):
        super().__init__()
        torch.manual_seed(0)
        plain = [nn.Linear(64, 64) for _ in range(2)]
        self.layers = nn.ModuleList(QuantLinear.from_linear(x, quantizer(x.weight, method, recompute)) for x in plain)

    def forward(self, x):
        return self.layers[1](self.layers[0](x).tanh())


class Experts(nn.Module):
    def __init__(self, method, recompute):
        super().__init__()
        torch.manual_seed(0)
        config = DeepseekV3Config(hidden_size=64, moe_intermediate_size=32, n_routed_experts=4)
        self.experts = DeepseekV3Experts(config)
        for p in self.experts.parameters():
            nn.init.normal_(p, std=0.2)
        pair = [quantizer(w, method, recompute) for w in (self.experts.gate_up_proj, self.experts.down_proj)]
        a8 = ActivationQuantizer(QuantScheme(8, "per_token"))
        attach_expert_quantizers(self.experts, *pair, a8, a8)
        self.run = quant_experts_forward(moe.grouped_mm_experts_forward)

    def forward(self, x):
        index = torch.arange(2 * len(x)).view(-1, 2) % 4
        return self.run(self.experts, x, index, torch.full(index.shape, 0.5))


def gradients(model, x):
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def inputs():
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [Linears, Experts])
def test_same_gradients_without_keeping_w_hat(kind, method):
    kept, rebuilt = kind(METHODS[method], False), kind(METHODS[method], True)
    for a, b in zip(gradients(kept, inputs()), gradients(rebuilt, inputs()), strict=True):
        assert torch.equal(a, b)

    made = []
    for m in rebuilt.modules():
        if isinstance(m, WeightQuantizer):
            m.register_forward_hook(lambda m, a, out: made.append(out.untyped_storage()._weak_ref()))
    y = rebuilt(inputs())
    assert made and all(torch.UntypedStorage._expired(ref) for ref in made), "w_hat outlives the forward"
    assert y.requires_grad


def test_changed_weight_or_scale_is_an_error():
    for change in (lambda m: m.weight, lambda m: m.weight_quantizer.scale):
        model = Linears(METHODS["lsq"], True)
        y = model(inputs())
        with torch.no_grad():
            change(model.layers[1]).mul_(2)
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_gradient_checkpointing(reentrant):
    kept, rebuilt = Linears(METHODS["lsq"], False), Linears(METHODS["lsq"], True)
    expected = gradients(kept, inputs())
    x = inputs()
    y = checkpoint(rebuilt, x, use_reentrant=reentrant)
    y.square().mean().backward()
    for a, b in zip([y.detach(), x.grad, *(p.grad for p in rebuilt.parameters())], expected, strict=True):
        assert torch.equal(a, b)


def test_disabled_quantiser_and_no_grad():
    model = Linears(METHODS["minmax"], True)
    with torch.no_grad():
        before = model(inputs())
    assert torch.equal(model(inputs()).detach(), before)
    for layer in model.layers:
        layer.weight_quantizer.enabled = False
    model(inputs()).sum().backward()


def test_stays_out_of_the_way_of_other_hooks():
    """Offloading and checkpointing must see every saved tensor, since inner hooks hide tensors from outer ones."""
    counts = []
    for recompute in (False, True):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t) or t, lambda t: t):
            Linears(METHODS["minmax"], recompute)(inputs())
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0
