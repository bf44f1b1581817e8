"""Plans of conf/quant on real models (meta device, no weights), and every refusal with module, value, rule, remedy."""

import copy
import json
import time
from dataclasses import replace

import pytest
from surgery_models import REAL_MODELS, RECIPES, load_recipe, meta_model, recipe_config, tiny_moe
from torch import nn

from qdeepseek.quant import QuantScheme
from qdeepseek.surgery import CoverageError, Recipe, Rule, TensorScheme, plan

W4_G32 = TensorScheme(QuantScheme(4, "per_group", 32))
W4_G128 = TensorScheme(QuantScheme(4, "per_group", 128))
INT8 = TensorScheme(QuantScheme(8, "per_channel"))
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED = tuple(f"mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down"))
QKVO = tuple(f"self_attn.{p}_proj" for p in "qkvo")
MLA = ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj")
MLA_LORA = (*MLA, "self_attn.q_a_proj", "self_attn.q_b_proj")
# model: layers, dense layers, attention projections, all parameters of the published model
SHAPES = {
    "deepseek_v2_lite": (27, 1, (*MLA, "self_attn.q_proj"), 15_706_484_224),
    "deepseek_v2": (60, 1, MLA_LORA, 235_741_434_880),
    "deepseek_v3": (61, 3, MLA_LORA, 671_026_404_352),
    "r1_distill_qwen_1_5b": (28, 28, QKVO, 1_777_088_000),
    "r1_distill_qwen_7b": (28, 28, QKVO, 7_615_616_512),
    "r1_distill_llama_8b": (32, 32, QKVO, 8_030_261_248),
    "deepseek_coder_6_7b": (32, 32, QKVO, 6_740_512_768),
}


def experts_of(model: str) -> set[str]:
    layers, dense, _, _ = SHAPES[model]
    return {f"model.layers.{i}.mlp.experts.{p}" for i in range(dense, layers) for p in ("gate_up_proj", "down_proj")}


def everything_in_layers(model: str) -> set[str]:
    layers, dense, attention, _ = SHAPES[model]
    linears = [(i, p) for i in range(layers) for p in (*attention, *(MLP if i < dense else SHARED))]
    return {f"model.layers.{i}.{p}.weight" for i, p in linears} | experts_of(model)


def expected(model: str, recipe: str) -> set[str]:
    return {"off": set, "w4_experts_only": lambda: experts_of(model)}.get(recipe, lambda: everything_in_layers(model))()


def recipe_of(*rules: Rule, **kwargs) -> Recipe:
    return Recipe("test", rules, **kwargs)


def test_every_real_configuration_has_a_shape():
    assert set(SHAPES) == set(REAL_MODELS)


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantised_names_of_real_models(model, recipe):
    if recipe == "w4_experts_only" and "deepseek_v" not in model:
        with pytest.raises(CoverageError, match=r"rule experts .*matches no module"):
            plan(meta_model(model), load_recipe(recipe))
        return
    coverage = plan(meta_model(model), load_recipe(recipe))
    assert {name for name, scheme in coverage.tensors.items() if scheme is not None} == expected(model, recipe)
    assert coverage.parameters == SHAPES[model][3]
    assert set(coverage.tensors) == {name for name, _ in meta_model(model).named_parameters()}
    if recipe not in ("off", "w4_experts_only"):
        assert coverage.unmatched == ()
        assert coverage.expert_share in (None, 1.0)


def test_v2_lite_down_proj_10944_gets_groups_of_64_and_a_row_of_its_own():
    coverage = plan(meta_model("deepseek_v2_lite"), load_recipe("w4a16_g128"))
    groups = {name: s.weight.group_size for name, s in coverage.tensors.items() if s is not None}
    assert {name for name, group in groups.items() if group != 128} == {"model.layers.0.mlp.down_proj.weight"}
    assert groups["model.layers.0.mlp.down_proj.weight"] == 64
    assert ("mlp", "W4A16 g64", 1) in [(row.part, row.scheme, row.tensors) for row in coverage.rows]


def test_mixed_and_activation_schemes_by_part():
    v3 = meta_model("deepseek_v3")
    label = {t.name: t.label for t in plan(v3, load_recipe("mixed")).planned}
    assert label["model.layers.5.self_attn.kv_b_proj.weight"] == "W8A16 per_channel"
    assert label["model.layers.5.mlp.experts.down_proj"] == "W4A16 g32"
    label = {t.name: t.label for t in plan(v3, load_recipe("w4a4")).planned}
    assert label["model.layers.0.mlp.up_proj.weight"] == "W4A4 g32"
    assert label["model.layers.0.mlp.down_proj.weight"] == "W4A8 g32"
    assert label["model.layers.5.mlp.experts.gate_up_proj"] == "W4A4 g32"
    assert label["model.layers.5.mlp.experts.down_proj"] == "W4A8 g32"
    assert label["model.layers.5.self_attn.kv_b_proj.weight"] == "W4A16 g32"


def test_671_billion_parameters_are_planned_in_seconds():
    model = meta_model("deepseek_v3")
    start = time.perf_counter()
    coverage = plan(model, load_recipe("w4a16_g128"))
    assert time.perf_counter() - start < 10
    assert 0.997 < coverage.quantized_share < 0.998
    assert 4.1 < coverage.bits_per_weight < 4.2


def test_kv_b_proj_and_head_change_with_one_override():
    config = recipe_config("w4a16_g128")
    config["rules"]["kv_b_proj"]["scheme"] = None
    config["rules"]["lm_head"]["scheme"] = config["rules"]["embedding"]["scheme"] = "int8"
    tensors = plan(meta_model("deepseek_v3"), Recipe.from_config(config)).tensors
    assert tensors["model.layers.0.self_attn.kv_b_proj.weight"] is None
    served = replace(INT8.weight, serve_dtype="bfloat16")  # as every recipe in conf/quant
    assert tensors["lm_head.weight"].weight == tensors["model.embed_tokens.weight"].weight == served


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_the_shipped_model(tiny_model, recipe):
    coverage = plan(tiny_model, load_recipe(recipe))
    assert coverage.expert_share == (0.0 if recipe == "off" else 1.0)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v4"])
def test_other_families(kind):
    coverage = plan(tiny_moe(kind), load_recipe("w4a16_g32"))
    assert coverage.expert_share == 1.0
    kept = {t.part for t in coverage.planned if t.scheme is None and len(t.shape) > 1}
    assert kept - {"other"} <= {"router", "embedding", "head"} | ({"attention"} if kind == "deepseek_v4" else set())


def test_vision_tower_and_aligner_are_never_quantised():
    import torch
    from transformers import DeepseekVLConfig, DeepseekVLForConditionalGeneration

    config = DeepseekVLConfig(
        text_config={
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 2, "vocab_size": 64, "tie_word_embeddings": False,
        },
        vision_config={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    )  # fmt: skip
    with torch.device("meta"):
        model = DeepseekVLForConditionalGeneration(config)
    coverage = plan(model, load_recipe("w4a16_g32"))
    quantised = {t.part for t in coverage.planned if t.scheme is not None}
    assert quantised == {"attention", "mlp"}
    assert {"vision", "aligner"} <= {t.part for t in coverage.planned}


# ---- refusals -------------------------------------------------------------------------------------------------------


def refused(model: nn.Module, recipe: Recipe, message: str) -> None:
    before = [(name, id(module)) for name, module in model.named_modules()]
    with pytest.raises(CoverageError, match=message):
        plan(model, recipe)
    assert before == [(name, id(module)) for name, module in model.named_modules()]


def test_a_rule_that_matches_nothing(tiny_model):
    rule = Rule(r".*self_atn\..*", W4_G32, name="attention")
    refused(tiny_model, recipe_of(rule, min_expert_share=0),
            r"rule attention \(match '.*self_atn.*'\) has no effect: it matches no module; module names look like "
            r"model.layers.0.self_attn.q_a_proj.*optional: true")  # fmt: skip
    plan(tiny_model, recipe_of(Rule(rule.match, W4_G32, optional=True), min_expert_share=0))


def test_a_rule_shadowed_by_an_earlier_one(tiny_model):
    rules = Rule(r".*_proj(_with_mqa)?", W4_G32, name="a"), Rule(r".*o_proj", None, name="b")
    refused(tiny_model, recipe_of(*rules, min_expert_share=0),
            r"rule b .*everything it matches is taken by an earlier rule .*o_proj by rule a")  # fmt: skip


def test_uncovered_experts(tiny_model):
    refused(tiny_model, recipe_of(Rule(r".*_proj(_with_mqa)?", W4_G32)),
            r"quantises 0.00% of the routed-expert parameters, below min_expert_share 99.00%; first one left out: "
            r"model.layers.1.mlp.experts \(DeepseekV3Experts, no rule matches\). Add a rule")  # fmt: skip
    one_layer = Rule(r".*layers\.1\.mlp\.experts", W4_G32)
    refused(tiny_model, recipe_of(one_layer), r"quantises 50.00% .*first one left out: model.layers.2.mlp.experts")
    plan(tiny_model, recipe_of(one_layer, min_expert_share=0.5))


def test_an_impossible_group_names_module_value_rule_and_remedy():
    rules = [Rule(r".*mlp\.experts", W4_G128), Rule(r".*mlp\.(gate|up|down)_proj", W4_G128, name="mlp")]
    model = meta_model("deepseek_v2_lite")
    refused(model, recipe_of(*rules),
            r"in_features 10944 is not a multiple of group_size 128 \(model.layers.0.mlp.down_proj.weight\); use "
            r"group_size 64 or 32.*bf16 with a rule in conf/quant \(rule mlp")  # fmt: skip
    rules[1] = Rule(rules[1].match, W4_G128, fallback=TensorScheme(QuantScheme(4, "per_group", 96)), name="mlp")
    plan(model, recipe_of(*rules))  # 10944 = 114 * 96
    rules[1] = Rule(rules[1].match, W4_G128, fallback=TensorScheme(QuantScheme(4, "per_group", 256)), name="mlp")
    refused(model, recipe_of(*rules), r"its fallback does not fit either: in_features 10944 .*group_size 256")


def test_odd_expert_sizes_are_refused_with_the_experts_name():
    """DeepseekV2Config() defaults to moe_intermediate_size 1407."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    with torch.device("meta"):
        model = DeepseekV2ForCausalLM(DeepseekV2Config(num_hidden_layers=2, first_k_dense_replace=1, n_group=1))
    assert model.model.layers[1].mlp.experts.down_proj.shape[-1] == 1407
    refused(model, load_recipe("w4a16_g32"), r"in_features 1407 .*model.layers.1.mlp.experts.down_proj.*per_channel")


def test_the_same_problem_in_every_layer_is_reported_once():
    rule = Rule(r".*mlp\.down_proj", TensorScheme(QuantScheme(4, "per_group", 4096)))
    with pytest.raises(CoverageError, match=r"and 31 more modules with the same problem") as error:
        plan(meta_model("deepseek_coder_6_7b"), recipe_of(rule))
    assert str(error.value).count("in_features") == 1


@pytest.mark.parametrize(
    ("match", "part"), [(r".*mlp\.gate", "router"), (r".*\.input_layernorm", "norm"), (r".*layers.*gate.*", "router")]
)
def test_routers_and_norms_are_never_quantised(tiny_model, match, part):
    refused(tiny_model, recipe_of(Rule(match, W4_G32, name="broad"), min_expert_share=0),
            rf"rule broad .* quantises model.layers.*, a {part} module, which always stays as it is; put a rule "
            r"{match: 'model.*', scheme: null} above it")  # fmt: skip


def test_classes_with_a_forward_of_their_own_are_refused():
    refused(tiny_moe("deepseek_v4"), recipe_of(Rule(r".*o_a_proj", W4_G32), min_expert_share=0),
            r"o_a_proj of class DeepseekV4GroupedLinear: it is a Linear with its own forward")  # fmt: skip


def test_a_parametrised_weight_is_refused_before_anything_changes(tiny_model):
    o_proj = tiny_model.model.layers[1].self_attn.o_proj
    nn.utils.parametrize.register_parametrization(o_proj, "weight", nn.Identity())
    refused(tiny_model, load_recipe("w4a16_g32"),
            r"rule attention .*layers.1.self_attn.o_proj .*parametrised \(LoRA\?\): prepare the model")  # fmt: skip


def test_an_embedding_that_rewrites_its_weight_is_refused():
    model = nn.Sequential(nn.Embedding(8, 32, max_norm=1.0))
    refused(model, recipe_of(Rule("0", INT8)), "Embedding that rewrites its weight")


def test_token_ids_have_no_activation_to_quantise(tiny_model):
    scheme = TensorScheme(INT8.weight, QuantScheme(8, "per_token"))
    refused(
        tiny_model,
        recipe_of(Rule(r".*embed_tokens", scheme), min_expert_share=0),
        "token ids; give it a scheme without",
    )


@pytest.mark.parametrize(
    ("bf16", "message"),
    [
        ("k_proj", r"q_proj is W4A16 g32 .*k_proj is unquantised .*fuse q_proj and k_proj"),
        ("up_proj", "gate_proj and up_"),
    ],
)
def test_fused_projections_share_one_scheme(bf16, message):
    rules = [Rule(rf".*\.{bf16}", None, name="keep"), Rule(r".*_proj", W4_G32, name="rest")]
    refused(meta_model("r1_distill_qwen_1_5b"), recipe_of(*rules), message)


def test_q_a_and_kv_a_are_fused_too():
    rules = [Rule(r".*kv_a_proj_with_mqa", INT8), Rule(r".*_proj", W4_G32), Rule(r".*experts", W4_G32)]
    refused(meta_model("deepseek_v3"), recipe_of(*rules), "runtimes fuse q_a_proj and kv_a_proj_with_mqa")


def expert_list() -> nn.Module:
    model = nn.Module()
    model.experts = nn.ModuleList(
        nn.ModuleDict({p: nn.Linear(64, 64) for p in ("gate_proj", "up_proj", "down_proj")}) for _ in range(3)
    )
    return model


def test_all_experts_of_a_layer_share_one_scheme():
    refused(expert_list(), recipe_of(Rule(r"experts\.2\..*", INT8), Rule(r".*_proj", W4_G32)), "fuse the experts")
    assert plan(expert_list(), recipe_of(Rule(r".*_proj", W4_G32))).expert_share == 1.0


@pytest.fixture
def tied_model(tiny_config):
    from transformers import DeepseekV3ForCausalLM

    config = copy.deepcopy(tiny_config)
    config.tie_word_embeddings = True
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize("match", ["lm_head", r"model\.embed_tokens"])
def test_a_tied_weight_is_refused_or_untied(tied_model, match):
    rule = Rule(match, INT8, name="head")
    message = r"rule head .*whose weight is tied \(model.embed_tokens and lm_head are one tensor\); set untie: true"
    refused(tied_model, recipe_of(rule, min_expert_share=0), message)
    tied = plan(tied_model, recipe_of(min_expert_share=0))
    untied = plan(tied_model, recipe_of(rule, untie=True, min_expert_share=0))
    assert untied.parameters - tied.parameters == 288 * 128
    assert tied_model.lm_head.weight is tied_model.model.embed_tokens.weight


# ---- the report -----------------------------------------------------------------------------------------------------


def test_table_and_dict(tiny_model):
    coverage = plan(tiny_model, load_recipe("w4a16_g32"))
    values = json.loads(json.dumps(coverage.to_dict()))
    assert sum(row["parameters"] for row in values["rows"]) == sum(p.numel() for p in tiny_model.parameters())
    assert sum(row["share"] for row in values["rows"]) == pytest.approx(1)
    assert values["tensors"]["model.layers.1.mlp.experts.down_proj"] == "W4A16 g32"
    assert values["tensors"]["lm_head.weight"] == "kept"
    table = coverage.table().splitlines()
    assert table[0].startswith("recipe w4a16_g32: ")
    assert "routed experts 100.00%" in table[0]
    assert table[2].split()[:4] == ["routed_experts", "DeepseekV3Experts", "W4A16", "g32"]


def test_bits_per_weight_counts_scales_and_kept_parameters():
    model = nn.Sequential(nn.Linear(64, 8, bias=False), nn.Linear(64, 8, bias=False))
    coverage = plan(model, recipe_of(Rule("0", W4_G32)))
    assert coverage.bits_per_weight == ((4 + 16 / 32) + 16) / 2
    assert coverage.unmatched == ("1",)
    assert "no rule mentions 1: kept" in coverage.table()
