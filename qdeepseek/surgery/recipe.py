"""A recipe says which module gets which scheme: an ordered list of rules over module names, first match wins.

    scheme(name) = rules[min i : rules[i].match fullmatches name].scheme      (None: stays as it is)

`conf/quant/*.yaml` holds recipes as plain mappings. Schemes have names so that a rule refers to one and a command line
can change it: `quant.schemes.main.weight.group_size=64`, `quant.rules.kv_b_proj.scheme=null`. Every mapping is strict:
an unknown key is an error that lists the allowed ones.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from qdeepseek.quant import QuantScheme, RangeMethod


@dataclass(frozen=True)
class TensorScheme:
    """How one weight and the activation that meets it are quantised.

    weight      format of the weight; of both `gate_up_proj` and `down_proj` for fused experts
    input       format of the activation, per token and dynamic; None keeps it as it is (W4A16)
    down_input  the same for inputs of `down_proj` (fused experts and Linear layers of that name); None: as `input`
    method      how the weight's scale is found or trained; not part of what is served
    """

    weight: QuantScheme
    input: QuantScheme | None = None
    down_input: QuantScheme | None = None
    method: RangeMethod = field(default_factory=RangeMethod)

    def __post_init__(self) -> None:
        if self.weight.granularity == "per_token":
            raise ValueError(
                "weight granularity per_token is for activations; use per_group, per_channel or per_tensor"
            )
        for key, scheme in (("input", self.input), ("down_input", self.down_input)):
            if scheme is not None and scheme.granularity not in ("per_token", "per_group"):
                raise ValueError(f"{key} granularity {scheme.granularity} mixes tokens; use per_token or per_group")
        if self.down_input is not None and self.input is None:
            raise ValueError(
                "down_input without input; give both, or set input to the wider format and leave out the other"
            )

    def input_of(self, name: str) -> QuantScheme | None:
        """The scheme of the activation that enters the weight `name` (a module or parameter name)."""
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        return self.down_input if leaf == "down_proj" and self.down_input is not None else self.input

    @property
    def serves_as(self) -> tuple[QuantScheme, QuantScheme | None, QuantScheme | None]:
        """What a runtime sees: two tensors with equal `serves_as` can be fused."""
        return (self.weight, self.input, self.down_input)

    @property
    def label(self) -> str:
        """Short name for tables, such as `W4A16 g128` or `W4A4 g32 down A8`."""
        text = self.label_of("")
        different = self.down_input is not None and self.down_input != self.input
        return f"{text} down A{self.down_input.bits}" if different and self.down_input else text

    def label_of(self, name: str) -> str:
        """The label for one weight, with the activation that meets it: `W4A8 g32` for the `down_proj` of W4A4."""
        weight, activation = self.weight, self.input_of(name)
        group = f"g{weight.group_size}" if weight.granularity == "per_group" else weight.granularity
        text = f"W{weight.bits}A{activation.bits if activation else 16} {group}"
        return text if weight.symmetric else f"{text} asym"

    def to_dict(self) -> dict[str, Any]:
        return {
            "weight": self.weight.to_dict(),
            "input": self.input.to_dict() if self.input else None,
            "down_input": self.down_input.to_dict() if self.down_input else None,
            "method": self.method.to_dict(),
        }

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], where: str = "scheme") -> "TensorScheme":
        values = strict(mapping, [f.name for f in fields(cls)], where)
        if values.get("weight") is None:
            raise ValueError(f"{where}: key weight is missing; give at least weight: {{bits: 4}}")
        types = {"weight": QuantScheme, "input": QuantScheme, "down_input": QuantScheme, "method": RangeMethod}
        built = {k: _build(types[k], v, f"{where}.{k}") for k, v in values.items() if v is not None}
        try:
            return cls(**built)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


@dataclass(frozen=True)
class Rule:
    """One line of a recipe.

    match     regular expression that must match the whole module name; fused experts are one module, `....mlp.experts`
    scheme    what matching modules get; None keeps them as they are
    optional  False: it is an error when nothing matches
    fallback  used instead of `scheme` where the group size does not divide in_features; None makes that an error
    """

    match: str
    scheme: TensorScheme | None
    optional: bool = False
    fallback: TensorScheme | None = None
    name: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"rule {self.name}: match {self.match!r} is not a regular expression ({error})") from error

    def matches(self, module_name: str) -> bool:
        return re.fullmatch(self.match, module_name) is not None

    def __str__(self) -> str:
        return f"rule {self.name} (match '{self.match}')" if self.name else f"rule '{self.match}'"


@dataclass(frozen=True)
class Recipe:
    """Rules in order, and what the result must satisfy.

    untie             clone a weight shared by embedding and lm_head, so that either can be quantised
    min_expert_share  share of routed-expert parameters that must be quantised in a model that has any; 0 turns it off
    """

    name: str
    rules: tuple[Rule, ...]
    untie: bool = False
    min_expert_share: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.min_expert_share <= 1:
            raise ValueError(f"recipe {self.name}: min_expert_share {self.min_expert_share} is not between 0 and 1")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Recipe":
        """Builds a recipe from a plain mapping `{name, schemes, rules, untie, min_expert_share}`.

        `schemes` maps a name to a TensorScheme mapping, `rules` maps a name to `{match, scheme, optional, fallback}`
        where scheme and fallback are names in `schemes` or null. Raises ValueError naming key, allowed keys and place.
        """
        values = strict(config, ["name", "schemes", "rules", "untie", "min_expert_share"], "quant")
        schemes = {
            key: TensorScheme.from_dict(value, f"quant.schemes.{key}")
            for key, value in _mapping(values.pop("schemes", None), "quant.schemes").items()
        }
        rules = [
            _rule(key, value, schemes)
            for key, value in _mapping(values.pop("rules", None), "quant.rules").items()
            if value is not None
        ]
        if not isinstance(values.get("name"), str):
            raise ValueError(
                "quant: key name is missing; give the recipe a name, it is written to reports and manifests"
            )
        return cls(rules=tuple(rules), **values)

    def to_dict(self) -> dict[str, Any]:
        """The mapping from which `from_config` builds an equal recipe."""
        schemes: dict[str, TensorScheme] = {}

        def name_of(scheme: TensorScheme | None) -> str | None:
            if scheme is None:
                return None
            for key, known in schemes.items():
                if known == scheme:
                    return key
            schemes[f"scheme_{len(schemes)}"] = scheme
            return f"scheme_{len(schemes) - 1}"

        rules = {
            rule.name or f"rule_{i}": {
                "match": rule.match, "scheme": name_of(rule.scheme), "optional": rule.optional,
                "fallback": name_of(rule.fallback),
            }
            for i, rule in enumerate(self.rules)
        }  # fmt: skip
        return {
            "name": self.name, "schemes": {k: v.to_dict() for k, v in schemes.items()}, "rules": rules,
            "untie": self.untie, "min_expert_share": self.min_expert_share,
        }  # fmt: skip


def strict(mapping: Any, allowed: list[str], where: str) -> dict[str, Any]:
    """`mapping` as a dict, or ValueError naming the unknown key and the allowed ones."""
    mapping = _mapping(mapping, where)
    for key in mapping:
        if key not in allowed:
            raise ValueError(f"{where}: unknown key {key!r}; allowed keys: {', '.join(allowed)}")
    return dict(mapping)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {value!r} is a {type(value).__name__}; a mapping of key: value is expected")
    return value


def _build(cls: type, mapping: Any, where: str) -> Any:
    values = strict(mapping, [f.name for f in fields(cls)], where)
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _rule(name: str, mapping: Any, schemes: Mapping[str, TensorScheme]) -> Rule:
    where = f"quant.rules.{name}"
    values = strict(mapping, ["match", "scheme", "optional", "fallback"], where)
    for key in ("match", "scheme"):
        if key not in values:
            raise ValueError(f"{where}: key {key} is missing; a rule is {{match: REGEX, scheme: NAME or null}}")
    for key in ("scheme", "fallback"):
        chosen = values.get(key)
        if chosen is not None and chosen not in schemes:
            known = ", ".join(schemes) or "none"
            raise ValueError(
                f"{where}.{key}: no scheme {chosen!r} in quant.schemes (there: {known}); null keeps modules as they are"
            )
        values[key] = None if chosen is None else schemes[chosen]
    return Rule(name=name, **values)
