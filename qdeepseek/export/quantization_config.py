"""`quantization_config` of config.json: which module has which scheme, in the words of compressed-tensors.

    config_groups = one group for each (weight scheme, input scheme): targets, weights, input_activations
    ignore        = every module with a 2-D weight that stays as it is, the router as `re:.*mlp\\.gate$`

A target is a class name (`Linear`), a module name, or `re:` and a regular expression that must match from the
start of the module name (`re.match`); names win over expressions, expressions over classes. One group for all
Linear layers is written the common way, `targets: [Linear]`. Several groups are told apart by expressions that
are exact on the names of this checkpoint.

The group of the routed experts comes first: transformers takes the first group whose expression contains
"experts" for all of them, and `shared_experts` contains that word too.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from qdeepseek.quant import QuantScheme
from qdeepseek.quant.kv_cache import KVCacheScheme

STRATEGIES = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group", "per_token": "token"}
ROUTED = re.compile(r".*\.experts\.\d+\.\w+")


@dataclass(frozen=True)
class ModuleFormat:
    """What a runtime must know about one quantised module."""

    weight: QuantScheme
    input: QuantScheme | None
    is_linear: bool = True


def build(
    quantized: Mapping[str, ModuleFormat],
    kept: Iterable[str],
    routers: Iterable[str] = (),
    kv_cache: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The mapping for config.json.

    quantized  checkpoint module name -> its format
    kept       module names with a 2-D weight that stays in 16 or 32 bits (router aside)
    routers    module names of routers
    kv_cache   `kv_cache_arguments` of the trained cache
    """
    kept, routers = list(kept), list(routers)
    universe = [*quantized, *kept, *routers]
    formats = list(dict.fromkeys(quantized.values()))
    formats.sort(key=lambda f: not any(ROUTED.fullmatch(name) for name, g in quantized.items() if g == f))
    groups = {}
    for number, module_format in enumerate(formats):
        members = [name for name, f in quantized.items() if f == module_format]
        single = len(formats) == 1 and module_format.is_linear
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if single else expressions(members, universe),
            "weights": arguments(module_format.weight, dynamic=False),
            "input_activations": arguments(module_format.input, dynamic=True),
            "output_activations": None,
            "format": "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "version": version("compressed-tensors"),
        "config_groups": groups,
        "ignore": [*expressions(kept, universe), *_router_expressions(routers)],
        "kv_cache_scheme": kv_cache,
        "global_compression_ratio": None,
    }


def arguments(scheme: QuantScheme | None, dynamic: bool) -> dict[str, Any] | None:
    """A scheme as compressed-tensors' QuantizationArgs."""
    if scheme is None:
        return None
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": STRATEGIES[scheme.granularity],
        "group_size": scheme.group_size,
        "dynamic": dynamic,
    }


def kv_cache_arguments(scheme: KVCacheScheme | None, latent: bool) -> dict[str, Any] | None:
    """`kv_cache_scheme` of a trained cache, None where the format cannot say it.

    latent  the model has MLA, whose runtimes store latent and rope key in one tensor with one scale

    The parser of compressed-tensors takes any type and a token or group strategy; the runtimes do not. vLLM knows 8-bit
    float with strategy tensor or attn_head and static scales, 1 where the checkpoint has none, and refuses to load a
    folder that says anything else; so does TensorRT-LLM; SGLang serves such a folder with a cache in 16 bits. Hence
    only FP8 with scale 1 on all that is cached is written here, and every other scheme in the manifest alone.
    """
    if scheme is None or not scheme.cache.static or (latent and scheme.rope != scheme.cache):
        return None
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "group_size": None,
        "dynamic": False,
    }


def expressions(names: Collection[str], universe: Collection[str]) -> list[str]:
    """Names or `re:` expressions that match all of `names` and nothing else of `universe`.

    Numbers in names become `\\d+` where every number occurs, and an alternation of layers where only some do.
    """
    wanted = set(names)
    members: dict[str, list[str]] = {}
    for name in dict.fromkeys([*names, *universe]):
        members.setdefault(_template(name), []).append(name)
    result = []
    for template in dict.fromkeys(_template(name) for name in names):
        alike = members[template]
        inside = [name for name in alike if name in wanted]
        if len(inside) == 1:
            result.append(inside[0])
        elif len(inside) == len(alike):
            result.append(f"re:^{template}$")
        else:
            result.extend(_by_first_number(template, inside, alike))
    return result


def _by_first_number(template: str, inside: list[str], alike: list[str]) -> list[str]:
    """Expressions for those first numbers (layers) whose names are all inside, exact names for the rest."""
    layers: dict[str, list[str]] = {}
    for name in alike:
        layers.setdefault(_first_number(name), []).append(name)
    wanted = set(inside)
    whole = [layer for layer, names in layers.items() if wanted.issuperset(names)]
    result = []
    if whole:
        choice = whole[0] if len(whole) == 1 else f"({'|'.join(whole)})"
        result.append(f"re:^{template.replace(_NUMBER, choice, 1)}$")
    return result + [name for name in inside if _first_number(name) not in whole]


_NUMBER = r"\d+"


def _template(name: str) -> str:
    return r"\.".join(_NUMBER if part.isdigit() else re.escape(part) for part in name.split("."))


def _first_number(name: str) -> str:
    return next((part for part in name.split(".") if part.isdigit()), "")


def _router_expressions(routers: Iterable[str]) -> list[str]:
    """`re:.*mlp\\.gate$`: by the last two parts of the name, so that it holds under any prefix a runtime adds."""
    tails = dict.fromkeys(re.escape(".".join(name.split(".")[-2:])) for name in routers)
    return [f"re:.*{tail}$" for tail in tails]
