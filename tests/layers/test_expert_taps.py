"""Taps see what lies between the experts' matmuls, with the expert of every row, in every implementation."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV3Config
from transformers.integrations import moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from qdeepseek.layers import (
    WeightQuantizer,
    attach_expert_quantizers,
    detach_expert_quantizers,
    naive_experts_forward,
    quant_experts_forward,
    tap_experts,
)
from qdeepseek.quant import QuantScheme, RangeMethod

E, H, INTER, T, K = 4, 64, 32, 12, 2
FORWARDS = {
    "grouped": quant_experts_forward(moe.grouped_mm_experts_forward, "expert"),
    "batched": quant_experts_forward(moe.batched_mm_experts_forward, "token"),
    "eager": naive_experts_forward,
}


@pytest.fixture
def experts():
    torch.manual_seed(0)
    config = DeepseekV3Config(hidden_size=H, moe_intermediate_size=INTER, n_routed_experts=E)
    module = DeepseekV3Experts(config)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    parts = [
        WeightQuantizer(QuantScheme(), RangeMethod(), getattr(module, n).shape) for n in ("gate_up_proj", "down_proj")
    ]
    attach_expert_quantizers(module, *parts)
    return module


def routing():
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1), requires_grad=True)
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(2))
    logits[:, 3] = -9  # an expert without tokens
    weights, index = logits.softmax(-1).topk(K, -1)
    return x, index, weights.requires_grad_()


@pytest.mark.parametrize("name", FORWARDS)
def test_taps_see_each_row_with_its_expert(experts, name):
    x, index, weights = routing()
    untapped = FORWARDS[name](experts, x, index, weights)
    seen = {"gate_up": [], "down_input": []}

    def tap(kind):
        return lambda rows, expert_S: (seen[kind].append((rows.detach(), expert_S)), rows)[1]

    tap_experts(experts, tap("gate_up"), tap("down_input"))
    assert torch.equal(FORWARDS[name](experts, x, index, weights), untapped)
    gate_up, experts_of = (torch.cat(part) for part in zip(*seen["gate_up"], strict=True))
    hidden, again = (torch.cat(part) for part in zip(*seen["down_input"], strict=True))
    assert torch.equal(experts_of, again) and gate_up.shape == (T * K, 2 * INTER) and hidden.shape == (T * K, INTER)
    w_hat = experts.gate_up_proj_quantizer(experts.gate_up_proj)
    for e in range(E):
        rows = (index == e).any(-1)
        expected = (x[rows] @ w_hat[e].T).detach()
        found = gate_up[experts_of == e]
        order = [t[:, 0].argsort() for t in (found, expected)]
        torch.testing.assert_close(found[order[0]], expected[order[1]], rtol=1e-4, atol=1e-5)
    tap_experts(experts)
    assert "taps" not in experts.__dict__


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_gradient_hook_acts_once_under_checkpointing(experts, name, reentrant):
    """Twice the gradient at down_proj's input, in the backward: the recomputed forward adds nothing to it."""

    def double(rows, expert_S):
        if rows.requires_grad:
            rows.register_hook(lambda g: 2 * g)
        return rows

    def gradients(tap, wrap):
        tap_experts(experts, down_input=tap)
        x, index, weights = routing()
        experts.zero_grad()
        call = (lambda *a: checkpoint(FORWARDS[name], experts, *a, use_reentrant=reentrant)) if wrap else None
        y = call(x, index, weights) if call else FORWARDS[name](experts, x, index, weights)
        y.backward(torch.ones_like(y))
        return x.grad, experts.gate_up_proj.grad.clone(), experts.down_proj.grad.clone(), weights.grad

    plain, once = gradients(None, False), gradients(double, True)
    for a, b in zip(once[:2], plain[:2], strict=True):
        assert torch.equal(a, 2 * b)
    for a, b in zip(once[2:], plain[2:], strict=True):
        assert torch.equal(a, b)


def test_what_cannot_be_tapped_is_refused(experts):
    tap_experts(experts, lambda rows, expert_S: rows)
    with pytest.raises(ValueError, match="without its row_order, which taps need"):
        quant_experts_forward(moe.batched_mm_experts_forward)(experts, *routing())
    detach_expert_quantizers(experts)
    assert "taps" not in experts.__dict__
    with pytest.raises(ValueError, match="DeepseekV3Experts has no quantisers"):
        tap_experts(experts, lambda rows, expert_S: rows)
