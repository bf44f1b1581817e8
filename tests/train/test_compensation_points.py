"""Each point: its place, its gradient against the naive rule, every implementation of the experts, torch.compile."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations import moe

from qdeepseek.compensate.relative import Relative
from qdeepseek.compensate.row import Row
from qdeepseek.compensate.seed import Seed
from qdeepseek.surgery import Recipe, prepare
from qdeepseek.train.callbacks.compensation_points import find_points, place_hooks
from tests.compensate import naive
from tests.train.test_config import composed

RULES = {"seed": Seed(norm=1e-3, variance=1e-5), "relative": Relative(), "row": Row()}


def prepared(model, experts="grouped_mm", dtype=torch.float64):
    model = copy.deepcopy(model).to(dtype).train()
    recipe = Recipe.from_config(composed("run_dir=x", "quant.schemes.main.method.learned=false")["quant"])
    prepare(model, recipe, experts=experts)
    return model


def place(model, rule, usual=None):
    """Hooks with a table of the usual; -> (points, calls, functions that remove them)."""
    points, calls = find_points(model), []

    def handle(number, g, tokens):
        point = points[number]
        rows = torch.full((point.groups, 2), torch.nan) if usual is None else usual.expand(point.groups, 2)
        result = rule(point.kind, g, tokens, rows.to(g.dtype))
        calls.append((point.name, g, tokens, result))
        return result.grad

    return points, calls, list(place_hooks(points, handle))


def backward(model, seed=0):
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def fp64_grouped_mm(monkeypatch):
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *args: False)


def test_points_of_the_shipped_model(tiny_model):
    model = prepared(tiny_model)
    points = find_points(model)
    layers = [f"model.layers.{i}.mlp" for i in range(3)]
    expected = {("embedding", "model.embed_tokens", 1)}
    for kind in ("up", "down"):
        expected |= {(kind, f"{layers[0]}.{kind}_proj", 1)}
        expected |= {(kind, f"{x}.experts.{kind}_proj", 8) for x in layers[1:]}
        expected |= {(kind, f"{x}.shared_experts.{kind}_proj", 1) for x in layers[1:]}
    assert {(p.kind, p.name, p.groups) for p in points} == expected


def test_every_point_is_called_once_and_hooks_go_away(tiny_model, fp64_grouped_mm):
    model = prepared(tiny_model)
    before = backward(model)
    points, calls, removers = place(model, RULES["seed"])
    changed = backward(model)
    assert sorted(name for name, *_ in calls) == sorted(p.name for p in points)
    assert not torch.equal(changed["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    for remove in removers:
        remove()
    again = backward(model)
    assert all(torch.equal(again[name], before[name]) for name in before)


@pytest.mark.parametrize("rule", RULES)
def test_checkpointing_changes_nothing(tiny_model, rule, fp64_grouped_mm):
    model = prepared(tiny_model)
    _, calls, _ = place(model, RULES[rule], torch.tensor([1e-4, 1e-5]))
    plain, number = backward(model), len(calls)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = backward(model)
    assert len(calls) == 2 * number
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("rule", RULES)
def test_eager_batched_and_grouped_experts_agree(tiny_model, rule, fp64_grouped_mm):
    results = []
    for experts in ("eager", "batched_mm", "grouped_mm"):
        model = prepared(tiny_model, experts)
        place(model, RULES[rule], torch.tensor([1e-4, 1e-5]))
        results.append(backward(model))
    plain = backward(prepared(tiny_model))
    assert any(not torch.allclose(plain[n], results[0][n], rtol=1e-6, atol=0) for n in plain if "experts" in n)
    for other in results[1:]:
        for name, expected in results[0].items():
            torch.testing.assert_close(other[name], expected, rtol=1e-8, atol=1e-14)


class LoopedExperts(nn.Module):
    """Experts one after another, with naive rules as gradient hooks; weights are dequantised ones."""

    def __init__(self, fused, rule, **extra):
        super().__init__()
        self.gate_up = fused.gate_up_proj_quantizer(fused.gate_up_proj).detach().requires_grad_()
        self.down = fused.down_proj_quantizer(fused.down_proj).detach().requires_grad_()
        self.rule, self.extra = rule, extra

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for e in range(len(self.down)):
            token, slot = (index == e).nonzero(as_tuple=True)
            if not len(token):
                continue
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            up = up.clone()
            up.register_hook(lambda g: self.rule("up", g, **self.extra)[0])
            hidden = F.silu(gate) * up
            hidden.register_hook(lambda g: self.rule("down", g, **self.extra)[0])
            out = out.index_add(0, token, F.linear(hidden, self.down[e]) * weights[token, slot, None])
        return out


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("rule", RULES)
def test_fused_experts_equal_a_loop_of_naive_rules(tiny_model, rule, experts, fp64_grouped_mm):
    model = prepared(tiny_model, experts)
    usual = torch.tensor([0.05, 20.0], dtype=torch.float64)
    place(model, RULES[rule], usual)
    fused = model.model.layers[1].mlp.experts
    extra = {"relative": {"usual": usual.tolist()}, "seed": {"norm": 1e-3, "variance": 1e-5}, "row": {}}[rule]
    loop = LoopedExperts(fused, getattr(naive, rule), **extra)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(30, 128, generator=g, dtype=torch.float64)
    weights, index = torch.randn(30, 8, generator=g, dtype=torch.float64).softmax(-1).topk(2, -1)
    grad = torch.randn(30, 128, generator=g, dtype=torch.float64)
    found = [x.clone().requires_grad_(), fused.gate_up_proj, fused.down_proj]
    expected = [x.clone().requires_grad_(), loop.gate_up, loop.down]
    a = torch.autograd.grad(fused(found[0], index, weights), found, grad)
    b = torch.autograd.grad(loop(expected[0], index, weights), expected, grad)
    for got, wanted in zip(a, b, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-14)


def test_dense_points_equal_the_naive_rule(tiny_model, fp64_grouped_mm):
    """Embedding output, and both points of the dense and the shared MLP, from what the hook was given."""
    model = prepared(tiny_model)
    _, calls, _ = place(model, RULES["seed"])
    backward(model)
    dense = {
        name: (g, result) for name, g, _, result in calls if not name.endswith("experts.up_proj") or "shared" in name
    }
    for name in ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.shared_experts.down_proj"):
        g, result = dense[name]
        kind = "embedding" if "embed" in name else name.rpartition(".")[2].removesuffix("_proj")
        assert g.shape[:2] == (2, 16)
        torch.testing.assert_close(result.grad, naive.seed(kind, g, 1e-3, 1e-5)[0], rtol=1e-12, atol=0)


def test_fused_experts_without_quantisers_are_refused(tiny_model):
    with pytest.raises(ValueError, match="quantise the experts by a rule in conf/quant"):
        place(tiny_model, RULES["seed"])


@pytest.mark.slow
def test_the_rest_compiles_and_hooks_break_the_graph(tiny_model, fp64_grouped_mm):
    """Attention compiled whole, a hooked MLP and its decoder layer with graph breaks: the same gradients."""
    eager, compiled = prepared(tiny_model), prepared(tiny_model)
    counts = []
    for model in (eager, compiled):
        _, calls, _ = place(model, RULES["row"])
        counts.append(calls)
    layers = compiled.model.layers
    layers[0].self_attn.compile(backend="aot_eager", fullgraph=True)
    layers[0].mlp.compile(backend="aot_eager")
    layers[1].compile(backend="aot_eager")
    expected, found = backward(eager), backward(compiled)
    assert len(counts[0]) == len(counts[1])
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-14)
    torch._dynamo.reset()
