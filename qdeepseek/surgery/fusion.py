"""Modules that a runtime fuses, hence change their precision together: the unit of the precision scheduler.

    q/k/v, q_a/kv_a, gate/up      members of one FUSION_GROUPS line under the same parent
    all experts of a layer        one fused module, its chunks, or every `experts.N.*` of a checkpoint with Linear
                                  experts
    anything else                 a group of its own

`keep_levels` turns levels into a recipe: one rule for each raised module, by its exact name, before all others, so
that plan, coverage, export and loader need to know nothing of levels.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from qdeepseek.layers import ActivationQuantizer, Level, WeightQuantizer, ladder, scheme_at, whole_name
from qdeepseek.quant import RangeMethod
from qdeepseek.surgery.families import FUSION_GROUPS
from qdeepseek.surgery.plan import plan
from qdeepseek.surgery.prepare import QuantizedTensor, prepare, quantized_tensors, restore_weights
from qdeepseek.surgery.recipe import Recipe, Rule, TensorScheme

_EXPERT = re.compile(r"((?:.*\.)?experts)\.(?:\d+\.\w+|from_\d+)")


@dataclass(frozen=True)
class FusionGroup:
    """Quantised weights that share a level.

    name     the module, or the parent and the members: `…self_attn.q_a_proj+kv_a_proj_with_mqa`
    ladder   levels that differ for its scheme, lowest first
    """

    name: str
    tensors: tuple[QuantizedTensor, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tensor.module_name for tensor in self.tensors))

    @property
    def ladder(self) -> tuple[Level, ...]:
        return ladder(self.tensors[0].scheme.bits)

    def label(self, level: Level) -> str:
        """`int4` for the target, else the level's own name."""
        return f"int{self.tensors[0].scheme.bits}" if level == "target" else level

    def set_level(self, level: Level) -> None:
        """Of the weight and input quantisers of every member. Between a backward and the next forward only."""
        for tensor in self.tensors:
            for child in tensor.module.children():
                if isinstance(child, WeightQuantizer | ActivationQuantizer):
                    child.level = level


def fusion_groups(model: nn.Module) -> list[FusionGroup]:
    """Groups of a prepared model, in model order. Raises ValueError if there is none."""
    members: dict[tuple[str, int | str], list[QuantizedTensor]] = {}
    for tensor in quantized_tensors(model):
        members.setdefault(_key(tensor.module_name), []).append(tensor)
    if not members:
        raise ValueError("the model has no quantised weight; call surgery.prepare first")
    return [FusionGroup(_name(key[0], tensors), tuple(tensors)) for key, tensors in members.items()]


def _key(name: str) -> tuple[str, int | str]:
    experts = _EXPERT.fullmatch(name)
    if experts is not None:
        return experts[1], ""
    parent, _, leaf = name.rpartition(".")
    row = next((i for i, line in enumerate(FUSION_GROUPS) if leaf in line), None)
    return (name, "") if row is None else (parent, row)


def _name(first: str, tensors: list[QuantizedTensor]) -> str:
    modules = list(dict.fromkeys(tensor.module_name for tensor in tensors))
    if len(modules) == 1 or _EXPERT.fullmatch(modules[0]):
        return first if len(modules) > 1 else modules[0]
    parent = modules[0].rpartition(".")[0]
    return f"{parent}." + "+".join(module.rpartition(".")[2] for module in modules)


@torch.no_grad()
def keep_levels(model: nn.Module, recipe: Recipe, levels: Mapping[str, Level]) -> Recipe:
    """Prepares `model` again so that raised modules stand at their level for good; returns the recipe that says so.

    levels: quantised module -> level; modules that are not in it stay at their target, their scales as trained.
    int8: 8 bits, min-max. bf16: unquantised, the weight rounded to its serve_dtype in place. The forward is the
    same bit for bit. Of the returned recipe the old rules are optional, and min_expert_share is what is left.
    """
    tensors = {tensor.name: tensor for tensor in quantized_tensors(model)}
    raised = {name: level for name, level in levels.items() if level != "target"}
    if not raised:
        return recipe
    states, rounded = {}, []
    for name, tensor in tensors.items():
        level = levels.get(tensor.module_name, "target")
        if level == "target":
            states[name] = tensor.quantizer.state_dict()
        elif level == "bf16":
            tensor.weight.copy_(tensor.quantizer(tensor.weight))
            rounded.append(name)
    experts = next((_implementation(t.module) for t in tensors.values() if hasattr(t.module, "config")), "grouped_mm")
    kept = raised_recipe(model, recipe, raised)
    restore_weights(model)
    prepare(model, kept, initialize=False, experts=experts)
    for tensor in quantized_tensors(model):
        if tensor.name in states:
            tensor.quantizer.load_state_dict(states[tensor.name])
    return kept


def raised_recipe(model: nn.Module, recipe: Recipe, levels: Mapping[str, Level]) -> Recipe:
    """`recipe` with a rule in front for each module of `levels`, none of which is at its target."""
    trained = {whole_name(tensor.module_name): tensor.scheme for tensor in quantized_tensors(model)}
    rules = []
    for module, level in {whole_name(module): level for module, level in levels.items()}.items():
        rule = next(rule for rule in recipe.rules if rule.matches(module))
        scheme = rule.scheme if rule.scheme and rule.scheme.weight == trained[module] else rule.fallback
        assert scheme is not None
        rules.append(Rule(re.escape(module), _scheme_at(scheme, level), name=f"{level}_{module}"))
    rest = tuple(replace(rule, optional=True) for rule in recipe.rules)
    loose = replace(recipe, name=f"{recipe.name}_raised", rules=(*rules, *rest), min_expert_share=0.0)
    share = plan(model, loose).expert_share
    return replace(loose, min_expert_share=min(recipe.min_expert_share, 1.0 if share is None else share))


def _scheme_at(scheme: TensorScheme, level: Level) -> TensorScheme | None:
    weight = scheme_at(scheme.weight, level)
    if weight is None:
        return None
    first, down = (None if s is None else scheme_at(s, level) for s in (scheme.input, scheme.down_input))
    return TensorScheme(weight, first, down, RangeMethod(gradient=scheme.method.gradient))


def _implementation(experts: nn.Module) -> str:
    return str(experts.config._experts_implementation).removeprefix("qdeepseek_")  # type: ignore[union-attr]
