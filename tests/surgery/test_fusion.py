"""Fusion groups of every family, and levels turned into a recipe without a bit of the forward changing."""

import pytest
import torch
from torch import nn

from qdeepseek.layers import QuantLinear
from qdeepseek.quant.kv_cache import KVCacheScheme
from qdeepseek.surgery import Recipe, plan, prepare, quantized_tensors
from qdeepseek.surgery.fusion import fusion_groups, keep_levels
from qdeepseek.surgery.kv_cache import attach_kv_cache, kv_cache_of
from tests.export.conftest import build_model, build_recipe


def groups_of(family, name="w4a16_g32"):
    model = build_model(family)
    prepare(model, build_recipe(name))
    return model, {group.name: group for group in fusion_groups(model)}


def test_deepseek_v3_groups():
    model, groups = groups_of("deepseek_v3")
    attention = "model.layers.0.self_attn."
    assert [name for name in groups if name.startswith("model.layers.0.")] == [
        f"{attention}q_a_proj+kv_a_proj_with_mqa", f"{attention}q_b_proj", f"{attention}kv_b_proj",
        f"{attention}o_proj", "model.layers.0.mlp.gate_proj+up_proj", "model.layers.0.mlp.down_proj",
    ]  # fmt: skip
    experts = groups["model.layers.1.mlp.experts"]
    assert experts.modules == (experts.name,) and len(experts.tensors) == 2
    assert "model.layers.1.mlp.shared_experts.gate_proj+up_proj" in groups
    found = [t.name for g in groups.values() for t in g.tensors]
    assert sorted(found) == sorted(t.name for t in quantized_tensors(model)) and len(set(found)) == len(found)


def test_other_families():
    assert "model.layers.0.self_attn.q_proj+k_proj+v_proj" in groups_of("llama")[1]
    mixed = groups_of("deepseek_v3", "mixed")[1]
    assert mixed["model.layers.0.self_attn.o_proj"].ladder == ("target", "bf16")
    assert mixed["model.layers.0.self_attn.o_proj"].label("target") == "int8"
    with pytest.raises(ValueError, match=r"no quantised weight; call surgery\.prepare"):
        fusion_groups(nn.Linear(4, 4))


def test_linear_experts_of_a_layer_are_one_group():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(32, 32, bias=False) for _ in range(3))

    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].mlp = nn.Module()
    model.layers[0].mlp.experts = nn.ModuleList([Expert(), Expert()])
    schemes = {"main": {"weight": {"bits": 4, "group_size": 32}}}
    rules = {"experts": {"match": r".*experts\.\d+\.\w+", "scheme": "main"}}
    prepare(model, Recipe.from_config({"name": "r", "schemes": schemes, "rules": rules}))
    (group,) = fusion_groups(model)
    assert group.name == "layers.0.mlp.experts" and len(group.modules) == 6
    group.set_level("int8")
    assert {t.quantizer.level for t in group.tensors} == {"int8"}


@pytest.mark.parametrize("name", ["w4a16_g32", "w4a4"])
def test_kept_levels_compute_the_same(name, ids):
    torch.manual_seed(0)
    recipe = build_recipe(name)
    model = build_model()
    prepare(model, recipe)
    groups = {group.name: group for group in fusion_groups(model)}
    with torch.no_grad():
        for t in quantized_tensors(model):  # scales that training has moved
            if t.quantizer.method.learned:
                t.quantizer.scale.mul_(1 + 0.1 * torch.rand_like(t.quantizer.scale))
    chosen = {
        "model.layers.1.mlp.experts": "int8", "model.layers.0.mlp.gate_proj+up_proj": "bf16",
        "model.layers.1.self_attn.q_a_proj+kv_a_proj_with_mqa": "int8", "model.layers.1.self_attn.o_proj": "bf16",
    }  # fmt: skip
    for group, level in chosen.items():
        groups[group].set_level(level)
    with torch.no_grad():
        before = model(ids).logits
    levels = {m: level for group, level in chosen.items() for m in groups[group].modules}
    kept = keep_levels(model, recipe, levels)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert {t.quantizer.level for t in quantized_tensors(model)} == {"target"}
    assert not isinstance(model.model.layers[0].mlp.gate_proj, QuantLinear)
    coverage = plan(build_model(), kept)
    assert coverage.tensors["model.layers.1.self_attn.o_proj.weight"] is None
    assert coverage.tensors["model.layers.1.mlp.experts.down_proj"].weight.bits == 8
    assert (coverage.expert_share, kept.min_expert_share) == (1.0, recipe.min_expert_share)
    assert Recipe.from_config(kept.to_dict()).to_dict() == kept.to_dict()


def test_experts_kept_in_bf16_lower_the_share_that_is_asked_for(ids):
    model, groups = groups_of("deepseek_v3")
    every = {m: "bf16" for group in groups.values() for m in group.modules}
    for group in groups.values():
        group.set_level("bf16")
    with torch.no_grad():
        before = model(ids).logits
    kept = keep_levels(model, build_recipe(), every)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert kept.min_expert_share == 0 and not [*quantized_tensors(model)]


def test_nothing_raised_is_the_recipe_itself():
    model, groups = groups_of("deepseek_v3")
    recipe = build_recipe()
    assert keep_levels(model, recipe, {m: "target" for g in groups.values() for m in g.modules}) is recipe


@pytest.fixture
def ids():
    return torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


def test_quantisers_of_the_kv_cache_stay(ids):
    model, groups = groups_of("deepseek_v3")
    attach_kv_cache(model, KVCacheScheme.from_dict({"cache": {"dtype": "int8"}}))
    group = groups["model.layers.0.self_attn.o_proj"]
    group.set_level("bf16")
    with torch.no_grad():
        before = model(ids).logits
    keep_levels(model, build_recipe(), {group.name: "bf16"})
    assert kv_cache_of(model) is not None
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
