"""Applies a recipe to the module names of a model and refuses it, before anything is changed, where it does not fit.

    scheme(module) = that of the first rule whose regular expression matches the whole name, its fallback where groups
                     do not divide in_features, None where there is no rule or the rule says null

Only shapes and names are read, so a 671 B model on the meta device is planned in seconds. All problems are collected
and reported in one CoverageError, the first of each kind in full.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from qdeepseek.layers import ActivationQuantizer, QuantEmbedding, QuantLinear, WeightQuantizer, whole_name
from qdeepseek.surgery.coverage import Coverage, CoverageError, PlannedTensor
from qdeepseek.surgery.families import FUSION_GROUPS, NEVER_QUANTIZED, is_fused_experts, part_of
from qdeepseek.surgery.recipe import Recipe, Rule, TensorScheme

_EXPERT_INDEX = re.compile(r"((?:.*\.)?experts)\.\d+\.(\w+)")


@dataclass(frozen=True)
class Assignment:
    """What the recipe says about one module that owns parameters."""

    name: str
    module: nn.Module
    part: str
    rule: Rule | None
    scheme: TensorScheme | None


class _Problems:
    """Collects messages; a kind that occurs often (every layer) is reported once, with a count."""

    def __init__(self) -> None:
        self.by_kind: dict[tuple[str, ...], list[str]] = {}

    def add(self, kind: tuple[str, ...], message: str) -> None:
        self.by_kind.setdefault(kind, []).append(message)

    def raise_if_any(self, recipe: Recipe) -> None:
        if not self.by_kind:
            return
        lines = [
            m[0] + (f" [and {len(m) - 1} more modules with the same problem]" if len(m) > 1 else "")
            for m in self.by_kind.values()
        ]
        raise CoverageError(f"recipe {recipe.name!r} does not fit the model:\n- " + "\n- ".join(lines))


def plan(model: nn.Module, recipe: Recipe) -> Coverage:
    """The coverage of `recipe` on `model`, which is not changed and may live on the meta device.

    Raises CoverageError for: a rule that is not optional and matches nothing; a rule that quantises a router, norm,
    vision tower, aligner, MTP module or an unsupported class; a group size that does not divide in_features; fused
    projections with different schemes; a tied weight that would be quantised; routed experts covered below
    `min_expert_share`.
    """
    return coverage_of(assign(model, recipe), recipe)


def assign(model: nn.Module, recipe: Recipe) -> list[Assignment]:
    """One Assignment for each module that owns parameters, in model order. Raises CoverageError, see `plan`."""
    problems = _Problems()
    assignments: list[Assignment] = []
    used: set[int] = set()
    for name, module in owners(model):
        index = next((i for i, rule in enumerate(recipe.rules) if rule.matches(whole_name(name))), None)
        rule = None if index is None else recipe.rules[index]
        if index is not None:
            used.add(index)
        part = part_of(name, module)
        scheme = None
        if rule is not None and rule.scheme is not None:
            scheme = _fitting_scheme(name, module, part, rule, problems)
        assignments.append(Assignment(name, module, part, rule, scheme))
    _check_rules_used(assignments, recipe, used, problems)
    _check_fusion(assignments, problems)
    _check_tied(assignments, recipe, problems)
    problems.raise_if_any(recipe)
    _check_experts(assignments, recipe)
    return assignments


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own parameters, without the quantisers that surgery itself adds."""
    for name, module in model.named_modules():
        if isinstance(module, WeightQuantizer | ActivationQuantizer):
            continue
        if next(module.parameters(recurse=False), None) is not None or is_parametrized(module):
            yield name, module


def weights_of(name: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a supported module that a scheme applies to, by parameter name."""
    keys = ("gate_up_proj", "down_proj") if is_fused_experts(module) else ("weight",)
    return [(f"{name}.{key}" if name else key, getattr(module, key)) for key in keys]


def coverage_of(assignments: list[Assignment], recipe: Recipe) -> Coverage:
    """Counts what `assign` decided; chunks of experts are counted as the whole that they are of."""
    planned: dict[str, PlannedTensor] = {}
    seen: set[int] = set()
    for a in assignments:
        quantised = {name for name, _ in weights_of(a.name, a.module)} if a.scheme else set()
        for key, parameter in a.module.named_parameters(recurse=False):
            if id(parameter) in seen and not recipe.untie:
                continue
            seen.add(id(parameter))
            name = f"{a.name}.{key}" if a.name else key
            scheme = a.scheme if name in quantised else None
            kind = _class(a.module) + (" bias" if key == "bias" else "")
            whole, shape = whole_name(name), tuple(parameter.shape)
            if whole in planned and whole != name:
                shape = (planned[whole].shape[0] + shape[0], *shape[1:])
            planned[whole] = PlannedTensor(whole, shape, math.prod(shape), a.part, kind, scheme)
    unmatched = tuple(a.name for a in assignments if a.rule is None and isinstance(a.module, nn.Linear | nn.Embedding))
    return Coverage(recipe.name, tuple(planned.values()), unmatched)


def _class(module: nn.Module) -> str:
    return {"QuantLinear": "Linear", "QuantEmbedding": "Embedding"}.get(type(module).__name__, type(module).__name__)


def _unsupported(module: nn.Module) -> str | None:
    """Why surgery cannot swap this module, or None."""
    if is_parametrized(module):
        return "its weight is parametrised (LoRA?): prepare the model first, add adapters afterwards"
    if is_fused_experts(module):
        if getattr(module, "is_transposed", False):
            return "its experts are stored transposed, (E, in, out), and groups must run along in"
        return None
    if isinstance(module, nn.Linear):
        own = type(module).forward not in (nn.Linear.forward, QuantLinear.forward)
        return "it is a Linear with its own forward, which a swap would lose" if own else None
    if isinstance(module, nn.Embedding):
        own = type(module).forward not in (nn.Embedding.forward, QuantEmbedding.forward)
        own = own or module.max_norm is not None
        return "it is an Embedding that rewrites its weight or has its own forward" if own else None
    return "only Linear, Embedding and fused experts can be quantised"


def _fitting_scheme(name: str, module: nn.Module, part: str, rule: Rule, problems: _Problems) -> TensorScheme | None:
    scheme = rule.scheme
    assert scheme is not None
    keep = f"put a rule {{match: '{re.escape(name)}', scheme: null}} above it, or make its regular expression narrower"
    if part in NEVER_QUANTIZED:
        problems.add(
            ("never", part, str(rule)), f"{rule} quantises {name}, a {part} module, which always stays as it is; {keep}"
        )
        return None
    reason = _unsupported(module)
    if reason is not None:
        problems.add(
            ("class", type(module).__name__, str(rule)),
            f"{rule} quantises {name} of class {type(module).__name__}: {reason}; {keep}",
        )
        return None
    if isinstance(module, nn.Embedding) and scheme.input is not None:
        problems.add(
            ("embedding input", str(rule)),
            f"{rule} quantises the input of {name}, which is token ids; give it a scheme without input",
        )
        return None
    misfit = _misfit(name, module, scheme)
    if misfit is None:
        return scheme
    if rule.fallback is not None and (second := _misfit(name, module, rule.fallback)) is None:
        return rule.fallback
    elif rule.fallback is not None:
        misfit = f"{misfit}; its fallback does not fit either: {second}"
    shapes = ", ".join(str(tuple(w.shape)) for _, w in weights_of(name, module))
    problems.add(("shape", str(rule), shapes), f"{misfit} ({rule})")
    return None


def _misfit(name: str, module: nn.Module, scheme: TensorScheme) -> str | None:
    """Why the scheme's groups do not fit the module's weights, with a remedy, or None."""
    for key, weight in weights_of(name, module):
        try:
            scheme.weight.check_shape(tuple(weight.shape), key)
        except ValueError as error:
            return str(error)
    return None


def _check_rules_used(assignments: list[Assignment], recipe: Recipe, used: set[int], problems: _Problems) -> None:
    for index, rule in enumerate(recipe.rules):
        if rule.optional or index in used:
            continue
        taken = [a for a in assignments if rule.matches(whole_name(a.name))]
        if taken:
            why = f"everything it matches is taken by an earlier rule ({taken[0].name} by {taken[0].rule})"
        else:
            linears = [a.name for a in assignments if isinstance(a.module, nn.Linear) or a.part == "routed_experts"]
            why = f"it matches no module; module names look like {', '.join(linears[:1] + linears[-2:])}"
        problems.add(
            ("unused", str(index)),
            f"{rule} has no effect: {why}; correct it, remove it, or set optional: true",
        )


def _check_fusion(assignments: list[Assignment], problems: _Problems) -> None:
    by_name = {a.name: a for a in assignments}
    for a in assignments:
        parent, _, leaf = a.name.rpartition(".")
        partners = [m for group in FUSION_GROUPS if leaf == group[0] for m in group[1:]]
        for partner in partners:
            other = by_name.get(f"{parent}.{partner}")
            if other is not None and _serves_as(a.scheme) != _serves_as(other.scheme):
                _add_fusion(a, other, f"{leaf} and {partner}", problems)
    first_expert: dict[tuple[str, ...], Assignment] = {}
    for a in assignments:
        if (match := _EXPERT_INDEX.fullmatch(a.name)) is not None:
            first = first_expert.setdefault(match.groups(), a)
            if _serves_as(a.scheme) != _serves_as(first.scheme):
                _add_fusion(first, a, "the experts of a layer", problems)


def _add_fusion(a: Assignment, b: Assignment, what: str, problems: _Problems) -> None:
    one, two = (x.scheme.label if x.scheme else "unquantised" for x in (a, b))
    problems.add(
        ("fusion", what, str(a.rule), str(b.rule)),
        f"{a.name} is {one} ({a.rule or 'no rule'}) and {b.name} is {two} ({b.rule or 'no rule'}): runtimes fuse "
        f"{what}, so they must share one scheme; let one rule match both",
    )


def _serves_as(scheme: TensorScheme | None) -> object:
    return None if scheme is None else scheme.serves_as


def _check_tied(assignments: list[Assignment], recipe: Recipe, problems: _Problems) -> None:
    if recipe.untie:
        return
    sharing: dict[int, list[Assignment]] = {}
    for a in assignments:
        for parameter in a.module.parameters(recurse=False):
            sharing.setdefault(id(parameter), []).append(a)
    for group in sharing.values():
        quantised = [a for a in group if a.scheme is not None]
        if len(group) > 1 and quantised:
            names = " and ".join(a.name for a in group)
            problems.add(
                ("tied", names),
                f"{quantised[0].rule} quantises {quantised[0].name}, whose weight is tied ({names} are one tensor); "
                "set untie: true in the recipe to clone it, or keep both in bf16",
            )


def _check_experts(assignments: list[Assignment], recipe: Recipe) -> None:
    coverage = coverage_of(assignments, recipe)
    share = coverage.expert_share
    if share is None or share >= recipe.min_expert_share:
        return
    missed = next(a for a in assignments if a.part == "routed_experts" and a.scheme is None)
    raise CoverageError(
        f"recipe {recipe.name!r} quantises {share:.2%} of the routed-expert parameters, below min_expert_share "
        f"{recipe.min_expert_share:.2%}; first one left out: {missed.name} ({type(missed.module).__name__}, "
        f"{missed.rule or 'no rule matches'}). Add a rule such as {{match: '(.*\\.)?mlp\\.experts', scheme: main}}, or "
        "set min_expert_share: 0 if the experts are meant to stay as they are"
    )
