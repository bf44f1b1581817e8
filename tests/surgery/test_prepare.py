"""prepare() shares Parameters, computes with exactly the quantised weights, and restore() undoes it."""

import copy

import pytest
import torch
from surgery_models import load_recipe, meta_model, recipe_config, tiny_moe
from torch import nn

from qdeepseek.layers import QuantEmbedding, QuantLinear, has_expert_quantizers
from qdeepseek.quant import QuantScheme, RangeMethod, dequantize
from qdeepseek.surgery import (
    CoverageError,
    Recipe,
    Rule,
    TensorScheme,
    autocast_experts,
    prepare,
    quantized_tensors,
    restore,
)

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v4"]
TOKENS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def parameters(model: nn.Module) -> dict[str, int]:
    return {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}


def by_hand(model: nn.Module) -> nn.Module:
    """A stock copy of a prepared model whose weights are overwritten with what its quantisers would serve."""
    stock = copy.deepcopy(model)
    served = {
        t.name: dequantize(*t.quantizer.quantize(t.weight), t.scheme, t.weight.dtype) for t in quantized_tensors(stock)
    }
    restore(stock)
    with torch.no_grad():
        for name, weight in served.items():
            stock.get_parameter(name).copy_(weight)
    return stock


@pytest.mark.parametrize("recipe", ["w4a16_g128", "w4a16_g32", "mixed", "w4_experts_only", "w2a16_g32", "off"])
def test_forward_equals_a_stock_model_with_the_served_weights(tiny_model, recipe):
    coverage = prepare(tiny_model, load_recipe(recipe))
    quantised = {name for name, scheme in coverage.tensors.items() if scheme is not None}
    assert {t.name for t in quantized_tensors(tiny_model)} == quantised
    assert torch.equal(logits(tiny_model), logits(by_hand(tiny_model)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_other_families_through_the_same_experts_interface(kind):
    model = tiny_moe(kind)
    before, keys, params = logits(model), list(model.state_dict()), parameters(model)
    prepare(model, load_recipe("w4a16_g32"))
    after = logits(model)
    assert not torch.equal(before, after)
    assert torch.equal(after, logits(by_hand(model)))
    assert {k: v for k, v in parameters(model).items() if k in params} == params
    restore(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(before, logits(model))


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v4"])
@pytest.mark.parametrize("recipe", ["w4a16_g32", "w4a4"])
def test_experts_implementations_agree(kind, recipe):
    outputs = []
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        model = tiny_moe(kind)
        prepare(model, load_recipe(recipe), experts=implementation)
        assert model.config._experts_implementation == f"qdeepseek_{implementation}"
        outputs.append(logits(model))
    spread = 1e-5 if recipe == "w4a16_g32" else 0.05  # an activation at a rounding border may take the next code
    assert (outputs[0] - outputs[1]).abs().max() <= spread
    assert (outputs[0] - outputs[2]).abs().max() <= spread


def test_every_quantised_weight_gets_a_gradient(tiny_model):
    config = recipe_config("w4a4")
    config["rules"]["lm_head"]["scheme"] = config["rules"]["embedding"]["scheme"] = "int8"
    prepare(tiny_model, Recipe.from_config(config))
    assert isinstance(tiny_model.lm_head, QuantLinear)
    assert isinstance(tiny_model.model.embed_tokens, QuantEmbedding)
    tiny_model(TOKENS).logits.square().mean().backward()
    for tensor in quantized_tensors(tiny_model):
        assert tensor.weight.grad is not None and tensor.weight.grad.abs().sum() > 0, tensor.name


def test_activation_schemes_arrive_where_they_belong(tiny_model):
    prepare(tiny_model, load_recipe("w4a4"))
    bits = {t.name: t.input.bits if t.input else 16 for t in quantized_tensors(tiny_model)}
    assert bits["model.layers.0.mlp.up_proj.weight"] == 4
    assert bits["model.layers.0.mlp.down_proj.weight"] == 8
    assert bits["model.layers.1.mlp.shared_experts.down_proj.weight"] == 8
    assert bits["model.layers.1.mlp.experts.gate_up_proj"] == 4
    assert bits["model.layers.1.mlp.experts.down_proj"] == 8
    assert bits["model.layers.1.self_attn.kv_b_proj.weight"] == 16


def test_restore_gives_back_stock_classes_and_the_experts_implementation(tiny_model):
    classes = {name: type(module) for name, module in tiny_model.named_modules()}
    implementation = tiny_model.config._experts_implementation
    prepare(tiny_model, load_recipe("w4a8"))
    assert tiny_model.config._experts_implementation == "qdeepseek_grouped_mm"
    restore(tiny_model)
    assert {name: type(module) for name, module in tiny_model.named_modules()} == classes
    assert tiny_model.config._experts_implementation == implementation
    assert next(quantized_tensors(tiny_model), None) is None
    prepare(tiny_model, load_recipe("w4a16_g32"))  # and again


def test_unquantised_experts_obey_autocast_and_change_no_bit_without(tiny_model, tmp_path):
    before = logits(tiny_model)
    autocast_experts(tiny_model)
    assert tiny_model.config._experts_implementation == "qdeepseek_grouped_mm"
    assert torch.equal(logits(tiny_model), before)
    weights = {tuple(p.shape) for n, p in tiny_model.named_parameters() if ".experts." in n}
    kept = []

    def pack(tensor):
        if tensor.ndim == 3 and {tuple(tensor.shape), tuple(tensor.mT.shape)} & weights:
            kept.append(tensor.dtype)
        return tensor

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        tiny_model(TOKENS, use_cache=False)
    assert kept and set(kept) == {torch.bfloat16}
    tiny_model.save_pretrained(tmp_path)
    assert "qdeepseek" not in (tmp_path / "config.json").read_text()
    prepare(tiny_model, load_recipe("w4a8"))
    restore(tiny_model)
    assert torch.equal(logits(tiny_model), before)


def test_prepare_changes_nothing_when_it_refuses(tiny_model):
    classes = {name: type(module) for name, module in tiny_model.named_modules()}
    scheme = TensorScheme(QuantScheme(4, "per_group", 32))
    rules = (Rule(r".*\.mlp\.(gate|up|down)_proj", scheme), Rule(r".*\.mlp\.gate", scheme))
    with pytest.raises(CoverageError, match="router"):
        prepare(tiny_model, Recipe("broken", rules))
    assert {name: type(module) for name, module in tiny_model.named_modules()} == classes


def test_preparing_twice_is_refused(tiny_model):
    prepare(tiny_model, load_recipe("w4a16_g32"))
    with pytest.raises(ValueError, match=r"q_a_proj.weight is quantised already; call restore"):
        prepare(tiny_model, load_recipe("w4a16_g32"))


def test_unknown_experts_implementation(tiny_model):
    with pytest.raises(ValueError, match="'fast' is not one of grouped_mm, batched_mm, eager"):
        prepare(tiny_model, load_recipe("w4a16_g32"), experts="fast")


def test_learned_scales_are_initialised_or_left_to_a_checkpoint(tiny_model):
    scheme = TensorScheme(QuantScheme(4, "per_group", 32), method=RangeMethod(learned=True))
    recipe = Recipe("lsq", (Rule(r".*mlp\.experts", scheme), Rule(r".*mlp\.(gate|up|down)_proj", scheme)))
    unset, ready = copy.deepcopy(tiny_model), tiny_model
    prepare(unset, recipe, initialize=False)
    prepare(ready, recipe)
    assert all(t.quantizer.scale.isnan().all() for t in quantized_tensors(unset))
    assert all((t.quantizer.scale > 0).all() for t in quantized_tensors(ready))
    unset.load_state_dict(ready.state_dict())
    assert torch.equal(logits(unset), logits(ready))


def test_a_whole_v2_lite_is_prepared_on_the_meta_device():
    model = copy.deepcopy(meta_model("deepseek_v2_lite"))
    coverage = prepare(model, load_recipe("w4a16_g128"))
    tensors = list(quantized_tensors(model))
    assert {t.name for t in tensors} == {name for name, scheme in coverage.tensors.items() if scheme}
    assert all(t.weight.is_meta for t in tensors)
    assert sum(has_expert_quantizers(m) for m in model.modules()) == 26
    restore(model)
    assert not any(isinstance(m, QuantLinear) for m in model.modules())


def test_untied_head_is_saved_and_loaded_as_its_own_weight(tiny_config, tmp_path):
    from transformers import DeepseekV3ForCausalLM

    config = copy.deepcopy(tiny_config)
    config.tie_word_embeddings = True
    model = DeepseekV3ForCausalLM(config).eval()
    before = logits(model)
    rules = (Rule("lm_head", TensorScheme(QuantScheme(8, "per_channel")), name="head"),)
    prepare(model, Recipe("head", rules, untie=True, min_expert_share=0))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    restore(model)
    assert torch.equal(logits(model), before)
    with torch.no_grad():
        model.lm_head.weight += 1
    model.save_pretrained(tmp_path)
    loaded = DeepseekV3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_per_tensor_scales_of_gate_and_up_are_separate(tiny_model):
    scheme = TensorScheme(QuantScheme(8, "per_tensor"))
    prepare(tiny_model, Recipe("tensor", (Rule(r".*mlp\.experts", scheme),)))
    shapes = {t.name.rpartition(".")[2]: t.quantizer.scale_shape for t in quantized_tensors(tiny_model)}
    assert shapes == {"gate_up_proj": (8, 2, 1), "down_proj": (8, 1, 1)}
