"""Recipes from mappings: strict keys, named schemes, first match wins, round trip; the files of conf/quant."""

import copy

import pytest
from surgery_models import RECIPES, load_recipe, recipe_config

from qdeepseek.quant import QuantScheme, RangeMethod
from qdeepseek.surgery import Recipe, Rule, TensorScheme

W4 = TensorScheme(QuantScheme(4, "per_group", 32))
INT4_TOKEN = QuantScheme(4, "per_token")
INT8_TOKEN = QuantScheme(8, "per_token")


def edited(path: str, value: object) -> dict:
    config = copy.deepcopy(recipe_config("w4a16_g128"))
    *parents, last = path.split(".")
    node = config
    for key in parents:
        node = node[key]
    node[last] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rulez", {}, r"quant: unknown key 'rulez'; allowed keys: name, schemes, rules, untie, min_expert_share"),
        ("schemes.main.weigth", {}, r"quant.schemes.main: unknown key 'weigth'; allowed keys: weight, input"),
        ("schemes.main.weight.bit", 4, r"quant.schemes.main.weight: unknown key 'bit'; allowed keys: bits"),
        ("schemes.main.method.kinds", "mse", r"quant.schemes.main.method: unknown key 'kinds'; allowed keys: kind"),
        ("schemes.main.weight", None, r"quant.schemes.main: key weight is missing"),
        ("schemes.main.weight.bits", 5, r"quant.schemes.main.weight: .*5"),
        ("schemes.main.weight.granularity", "per_token", r"quant.schemes.main: .*per_token is for activations"),
        ("schemes.main.input", {"granularity": "per_tensor"}, r"quant.schemes.main: input .* per_tensor mixes tokens"),
        ("schemes.main.down_input", {"granularity": "per_token"}, r"quant.schemes.main: down_input without input"),
        ("rules.mlp.schema", "main", r"quant.rules.mlp: unknown key 'schema'; allowed keys: match, scheme"),
        ("rules.mlp.scheme", "mian", r"quant.rules.mlp.scheme: no scheme 'mian' in quant.schemes \(there: main, rag"),
        ("rules.mlp.fallback", "no", r"quant.rules.mlp.fallback: no scheme 'no'"),
        ("rules.mlp.match", "(", r"rule mlp: match '\(' is not a regular expression"),
        ("rules.mlp", {"match": "x"}, r"quant.rules.mlp: key scheme is missing"),
        ("rules.mlp", ["x"], r"quant.rules.mlp: \['x'\] is a list; a mapping"),
        ("min_expert_share", 99, r"min_expert_share 99 is not between 0 and 1"),
        ("name", None, r"quant: key name is missing"),
    ],
)
def test_a_wrong_config_names_key_place_and_remedy(path, value, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_config(edited(path, value))


def test_from_config_builds_what_it_says():
    recipe = Recipe.from_config(
        {
            "name": "small",
            "schemes": {"main": {"weight": {"bits": 3, "group_size": 64}, "method": {"kind": "mse"}}},
            "rules": {"a": {"match": "x", "scheme": None}, "b": {"match": ".*", "scheme": "main", "optional": True}},
            "untie": True,
        }
    )
    scheme = TensorScheme(QuantScheme(3, "per_group", 64), method=RangeMethod("mse"))
    assert recipe == Recipe("small", (Rule("x", None, name="a"), Rule(".*", scheme, True, name="b")), untie=True)


def test_a_rule_set_to_null_on_the_command_line_is_gone():
    recipe = Recipe.from_config(edited("rules.lm_head", None))
    assert "lm_head" not in [rule.name for rule in recipe.rules]


def test_rules_match_whole_names():
    rule = Rule(r"mlp\.gate", W4)
    assert rule.matches("mlp.gate")
    assert not rule.matches("mlp.gate_proj")
    assert not rule.matches("model.mlp.gate")


def test_down_proj_has_an_input_scheme_of_its_own():
    scheme = TensorScheme(W4.weight, INT4_TOKEN, INT8_TOKEN)
    assert scheme.input_of("model.layers.0.mlp.down_proj") == INT8_TOKEN
    assert scheme.input_of("model.layers.0.mlp.down_proj.weight") == INT8_TOKEN
    assert scheme.input_of("model.layers.0.mlp.up_proj") == INT4_TOKEN
    assert TensorScheme(W4.weight, INT4_TOKEN).input_of("down_proj") == INT4_TOKEN
    assert scheme.label == "W4A4 g32 down A8"
    assert scheme.label_of("x.down_proj") == "W4A8 g32"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_file_survives_a_round_trip(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert Recipe.from_config(recipe.to_dict()) == recipe


def test_the_recipe_files_share_one_set_of_rules():
    """The files repeat the regular expressions so that each can be read alone; they must not drift apart."""
    first = {key: rule["match"] for key, rule in recipe_config("w4a16_g128")["rules"].items()}
    for name in set(RECIPES) - {"off"}:
        assert {key: rule["match"] for key, rule in recipe_config(name)["rules"].items()} == first, name
