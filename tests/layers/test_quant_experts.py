"""Fused experts of transformers: the quantised grouped_mm, batched_mm and eager forwards agree with each other and
with the stock module run on dequantised weights, values and gradients."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.integrations import moe

from qdeepseek.layers import (
    ActivationQuantizer,
    QuantLinear,
    WeightQuantizer,
    attach_expert_quantizers,
    detach_expert_quantizers,
    naive_experts_forward,
    quant_experts_forward,
)
from qdeepseek.quant import QuantScheme, RangeMethod, dequantize, fake_quantize_activation

E, H, INTER, T, K = 4, 64, 32, 12, 2
FORWARDS = {
    "grouped": quant_experts_forward(moe.grouped_mm_experts_forward),
    "batched": quant_experts_forward(moe.batched_mm_experts_forward),
    "eager": naive_experts_forward,
}
W4 = QuantScheme(group_size=32)
A8 = QuantScheme(8, "per_token", scale_dtype="float32")
A4 = QuantScheme(4, "per_token", scale_dtype="float32")
ACTIVATIONS = {"w4a16": (None, None), "w4a8": (A8, A8), "w4a4": (A4, A8)}


def experts_classes():
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return {
        "deepseek_v2": DeepseekV2Experts, "deepseek_v3": DeepseekV3Experts, "deepseek_v4": DeepseekV4Experts,
        "mixtral": MixtralExperts, "qwen2_moe": Qwen2MoeExperts, "qwen3_moe": Qwen3MoeExperts,
    }  # fmt: skip


FAMILIES = [*experts_classes()]


def make(family, seed=0):
    """Experts of one family with random weights; gate values large enough for V4's clamp to act."""
    config = AutoConfig.for_model(family)
    sizes = {
        "hidden_size": H, "moe_intermediate_size": INTER, "intermediate_size": INTER, "num_experts": E,
        "num_local_experts": E, "n_routed_experts": E, "hidden_act": "silu", "swiglu_limit": 1.0,
    }  # fmt: skip
    for name, value in sizes.items():
        setattr(config, name, value)
    experts = experts_classes()[family](config)
    torch.manual_seed(seed)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def attach(experts, activations=(None, None), method=None, scheme=W4):
    quantizers, method = [], method or RangeMethod()
    for name, blocks in (("gate_up_proj", 2), ("down_proj", 1)):
        w = getattr(experts, name)
        quantizers.append(WeightQuantizer(scheme, method, w.shape, row_blocks=blocks))
        quantizers[-1].initialize(w)
    attach_expert_quantizers(experts, *quantizers, *(s and ActivationQuantizer(s) for s in activations))
    return experts


def routing(seed=1, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=g).to(dtype).requires_grad_()
    logits = torch.randn(T, E, generator=g)
    logits[:, 3] = -9  # an expert without tokens
    weights, index = logits.softmax(-1).topk(K, -1)
    return x, index, weights.to(dtype).requires_grad_()


def run(experts, forward, seed=1):
    x, index, weights = routing(seed, experts.gate_up_proj.dtype)
    y = forward(experts, x, index, weights)
    parameters = [*experts.parameters()]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, weights, *parameters], grad)]


@pytest.fixture
def fp64_grouped_mm(monkeypatch):
    """transformers' fallback loop instead of torch's kernel, which has no fp64."""
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *args: False)


@pytest.mark.parametrize("family", FAMILIES)
def test_forwards_agree_in_fp32(family):
    """The real grouped_mm kernel; weights only, as an int8 step could flip on a rounding difference."""
    experts = attach(make(family))
    reference = run(experts, FORWARDS["eager"])
    for name in ("grouped", "batched"):
        for got, expected in zip(run(experts, FORWARDS[name]), reference, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_forwards_agree(family, activations, fp64_grouped_mm):
    """In fp64, where a rounding difference does not flip an int8 step of down_proj's input."""
    experts = attach(make(family).double(), ACTIVATIONS[activations])
    reference = run(experts, FORWARDS["eager"])
    for name in ("grouped", "batched"):
        for got, expected in zip(run(experts, FORWARDS[name]), reference, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("forward", FORWARDS)
def test_w4a16_is_the_stock_module_on_dequantised_weights(family, forward):
    """Bit for bit, since the same stock function multiplies the same numbers (eager: transformers' own loop)."""
    experts = attach(make(family))
    stock = make(family)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            quantizer = getattr(experts, f"{name}_quantizer")
            codes, scale, zero = quantizer.quantize(getattr(experts, name))
            getattr(stock, name).copy_(dequantize(codes, scale, zero, quantizer.scheme))
    stock_forward = {
        "grouped": moe.grouped_mm_experts_forward, "batched": moe.batched_mm_experts_forward,
        "eager": type(stock).forward.__wrapped__,
    }[forward]  # fmt: skip
    got, expected = run(experts, FORWARDS[forward]), run(stock, stock_forward)
    assert torch.equal(got[0], expected[0])
    for a, b in zip(got[1:], expected[1:], strict=True):  # gradients straight-through: those of the stock weights
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("forward", FORWARDS)
def test_without_quantisers_it_is_stock(family, forward):
    experts = make(family)
    stock = {
        "grouped": moe.grouped_mm_experts_forward, "batched": moe.batched_mm_experts_forward,
        "eager": type(experts).forward.__wrapped__,
    }[forward]  # fmt: skip
    for a, b in zip(run(experts, FORWARDS[forward]), run(experts, stock), strict=True):
        assert torch.equal(a, b)
    before = {*experts.state_dict()}
    detach_expert_quantizers(attach(experts, (A8, A8), RangeMethod(learned=True)))
    assert {*experts.state_dict()} == before
    assert torch.equal(run(experts, FORWARDS[forward])[0], run(experts, stock)[0])


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "per_group"])
@pytest.mark.parametrize("learned", [False, True])
def test_fused_experts_equal_a_list_of_linears(activations, granularity, learned, fp64_grouped_mm):
    """3-D equals stacked 2-D: every expert as three QuantLinear (gate, up, down), routed by hand."""
    scheme = QuantScheme(granularity=granularity)
    method = RangeMethod(learned=learned)
    experts = attach(make("deepseek_v3").double(), ACTIVATIONS[activations], method, scheme)
    x, index, weights = routing(dtype=torch.float64)
    input_scheme, down_scheme = ACTIVATIONS[activations]

    def linear(w, s):
        plain = nn.Linear(w.shape[1], w.shape[0], bias=False)
        plain.weight = nn.Parameter(w.detach().clone())
        quantizer = WeightQuantizer(scheme, method, w.shape)
        quantizer.initialize(plain.weight)
        return QuantLinear.from_linear(plain, quantizer, s and ActivationQuantizer(s))

    expected = torch.zeros(T, H, dtype=torch.float64)
    for e in range(E):
        gate, up = (linear(w, input_scheme) for w in experts.gate_up_proj[e].chunk(2))
        down = linear(experts.down_proj[e], down_scheme)
        for t, k in (index == e).nonzero().tolist():
            token = x[t : t + 1]
            expected[t] += (weights[t, k] * down(torch.nn.functional.silu(gate(token)) * up(token)))[0].detach()
    for forward in FORWARDS.values():
        torch.testing.assert_close(forward(experts, x, index, weights).detach(), expected, rtol=1e-12, atol=1e-12)


def test_bf16_forwards_agree_as_far_as_the_stock_ones():
    experts = attach(make("deepseek_v3").bfloat16(), (A8, A8))
    eager, grouped = (run(experts, FORWARDS[name])[0].float() for name in ("eager", "grouped"))
    stock = make("deepseek_v3").bfloat16()
    own = run(stock, type(stock).forward.__wrapped__)[0].float() - run(stock, moe.grouped_mm_experts_forward)[0].float()
    # int8 steps of the input of down_proj (1/127 of a token's largest) may flip where bf16 differs
    assert (eager - grouped).abs().max() <= 2 * own.abs().max() + eager.abs().max() / 64


def test_the_input_is_quantised_once_and_down_input_after_the_gate():
    experts = attach(make("deepseek_v3"), (A8, A4))
    seen = {"input": [], "down": []}
    experts.input_quantizer.register_forward_hook(lambda m, a, out: seen["input"].append(a[0].shape))
    experts.down_input_quantizer.register_forward_hook(lambda m, a, out: seen["down"].append((a[0], out)))
    x, index, weights = routing()
    FORWARDS["grouped"](experts, x, index, weights)
    assert seen["input"] == [(T, H)], "before the copies for the top-k experts"
    ((hidden, hidden_hat),) = seen["down"]
    assert hidden.shape == (T * K, INTER)
    assert torch.equal(hidden_hat, fake_quantize_activation(hidden, A4))


def test_through_the_experts_interface_and_checkpointing():
    """As the model calls it: config._experts_implementation; recomputation gives the same gradients."""
    experts = attach(make("deepseek_v3"), (A8, A8))
    moe.ALL_EXPERTS_FUNCTIONS["test_quant_experts"] = FORWARDS["grouped"]
    experts.config._experts_implementation = "test_quant_experts"
    plain = run(experts, lambda module, *args: module(*args))
    for reentrant, cache in ((False, False), (False, True), (True, True)):
        for quantizer in (experts.gate_up_proj_quantizer, experts.down_proj_quantizer):
            quantizer.cache = cache
        x, index, weights = routing()
        y = torch.utils.checkpoint.checkpoint(experts, x, index, weights, use_reentrant=reentrant)
        experts.zero_grad()
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
        got = [y.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())]
        for a, b in zip(got, plain, strict=True):
            assert torch.equal(a, b)


def test_a_whole_model_in_both_implementations(tiny_model, fp64_grouped_mm):
    """One training step's loss and gradients of the small DeepSeek-V3, eager against grouped_mm, W4A8."""
    results = []
    for name in ("eager", "grouped"):
        model = copy.deepcopy(tiny_model).double()
        moe.ALL_EXPERTS_FUNCTIONS[f"test_{name}"] = FORWARDS[name]
        model.config._experts_implementation = f"test_{name}"
        for layer in model.model.layers[1:]:
            attach(layer.mlp.experts, (A8, A8))
        ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_attach_refuses_what_it_cannot_quantise():
    class Ungated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = nn.Parameter(torch.zeros(2, 4, 4))

    quantizer = WeightQuantizer(W4, RangeMethod(), (2, 4, 32))
    with pytest.raises(ValueError, match=r"Ungated has no \['gate_up_proj', 'down_proj'\]"):
        attach_expert_quantizers(Ungated(), quantizer, quantizer)
    experts = make("deepseek_v3")
    experts.is_transposed = True
    with pytest.raises(ValueError, match=r"\(E, in, out\)"):
        attach_expert_quantizers(experts, quantizer, quantizer)
