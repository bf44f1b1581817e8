"""Targets and ignore list are exact, as compressed-tensors itself matches them."""

import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name, match_targets

from qdeepseek.export.quantization_config import ModuleFormat, build, expressions
from qdeepseek.quant import QuantScheme

INT4 = ModuleFormat(QuantScheme(bits=4), None)
INT8 = ModuleFormat(QuantScheme(bits=8, granularity="per_channel"), None)
A8 = QuantScheme(bits=8, granularity="per_token")
LAYERS = range(4)
ATTENTION = [f"model.layers.{i}.self_attn.{p}" for i in LAYERS for p in ("q_a_proj", "o_proj")]
EXPERTS = [f"model.layers.{i}.mlp.experts.{e}.{p}_proj" for i in LAYERS[1:] for e in range(12) for p in ("up", "down")]
SHARED = [f"model.layers.{i}.mlp.shared_experts.up_proj" for i in LAYERS[1:]]
MTP = [f"model.layers.4.mlp.experts.{e}.up_proj" for e in range(12)] + ["model.layers.4.eh_proj"]
ROUTERS = [f"model.layers.{i}.mlp.gate" for i in LAYERS[1:]]


def groups_of(config, names):
    """Group of each module, resolved by the library."""
    parsed = QuantizationConfig.model_validate(config)
    by_target = {t: g for g, scheme in parsed.config_groups.items() for t in scheme.targets}
    linear = torch.nn.Linear(1, 1, device="meta")
    found = {}
    for name in names:
        ignored = any(match_name(name, target) for target in parsed.ignore)
        targets = [] if ignored else match_targets(name, linear, by_target)
        found[name] = by_target[targets[0]] if targets else None
    return found


@pytest.mark.parametrize(
    "names",
    [ATTENTION, EXPERTS, MTP, EXPERTS[:24], EXPERTS[:3], [*EXPERTS[:24], *EXPERTS[48:]], ["lm_head"], [], SHARED[1:]],
)
def test_expressions_are_exact(names):
    universe = [*ATTENTION, *EXPERTS, *SHARED, *MTP, *ROUTERS, "lm_head"]
    result = expressions(names, universe)
    matched = {name for name in universe if any(match_name(name, target) for target in result)}
    assert matched == set(names)
    assert len(result) <= max(4, len(names) if len(names) < 24 else 4)


def test_dots_and_digits_are_literal():
    names = ["model.layers.1.fc1", "model.layers.2.fc1"]
    (expression,) = expressions(names, names)
    assert expression == r"re:^model\.layers\.\d+\.fc1$"
    assert not re.match(expression.removeprefix("re:"), "model.layers.1.fc12")
    assert not re.match(expression.removeprefix("re:"), "modelXlayers.1.fc1")


def test_one_scheme_targets_linear_and_ignores_the_rest():
    kept = [*MTP, "lm_head"]
    config = build(dict.fromkeys([*ATTENTION, *EXPERTS], INT4), kept, ROUTERS)
    assert config["format"] == "pack-quantized" and config["quantization_status"] == "compressed"
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]
    assert config["ignore"] == [
        r"re:^model\.layers\.4\.mlp\.experts\.\d+\.up_proj$", "model.layers.4.eh_proj", "lm_head", r"re:.*mlp\.gate$",
    ]  # fmt: skip
    found = groups_of(config, [*ATTENTION, *EXPERTS, *kept, *ROUTERS])
    assert {name for name, group in found.items() if group is None} == {*kept, *ROUTERS}


def test_several_schemes_and_the_routed_experts_first():
    """transformers gives the first group whose expression says `experts` to the routed ones."""
    down = ModuleFormat(QuantScheme(bits=4), A8)
    quantized = dict.fromkeys(ATTENTION, INT8) | dict.fromkeys(SHARED, INT8)
    quantized |= {name: down if name.endswith("down_proj") else INT4 for name in EXPERTS}
    config = build(quantized, ["lm_head"], ROUTERS)
    found = groups_of(config, [*quantized, "lm_head", *ROUTERS])
    for name, module_format in quantized.items():
        group = config["config_groups"][found[name]]
        assert group["weights"]["num_bits"] == module_format.weight.bits
        assert (group["input_activations"] is None) == (module_format.input is None)
    assert found["lm_head"] is None and all(found[name] is None for name in ROUTERS)

    from transformers.integrations.compressed_tensors import get_experts_scheme

    chosen = get_experts_scheme(QuantizationConfig.model_validate(config))
    assert chosen.weights.num_bits == 4


def test_arguments():
    config = build({"a": ModuleFormat(QuantScheme(bits=8, granularity="per_tensor", symmetric=False), A8)}, [])
    (group,) = QuantizationConfig.model_validate(config).config_groups.values()
    assert (group.weights.num_bits, group.weights.strategy, group.weights.symmetric) == (8, "tensor", False)
    assert (group.input_activations.strategy, group.input_activations.dynamic) == ("token", True)
    assert group.format == "pack-quantized"


def test_a_quantised_embedding_is_targeted_by_name():
    embedding = ModuleFormat(INT4.weight, None, is_linear=False)
    config = build(dict.fromkeys(ATTENTION, INT4) | {"model.embed_tokens": embedding}, ["lm_head"])
    targets = [target for group in config["config_groups"].values() for target in group["targets"]]
    assert "model.embed_tokens" in targets and "Linear" not in targets
