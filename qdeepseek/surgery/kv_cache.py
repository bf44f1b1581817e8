"""Puts the KV-cache quantisers of layers/kv_cache.py into a model and takes them out again.

    MLA     a forward hook at kv_a_layernorm; with a rope format also the attention function
    others  the attention function, selected by name: config._attn_implementation = qdeepseek_kv_<the one before>

The hook is needed because transformers expands the latent through kv_b_proj before it calls the attention function,
while MLA runtimes cache the latent. Names of parameters, state_dict and classes stay as they were.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from qdeepseek.layers.kv_cache import (
    CacheQuantizer,
    KeyValueQuantizer,
    RopeQuantizer,
    quantize_output,
    with_quantized_cache,
)
from qdeepseek.quant.kv_cache import KVCacheScheme
from qdeepseek.surgery.families import part_of

PREFIX = "qdeepseek_kv_"
ATTENTION = ("sdpa", "flex_attention", "eager")


def attach_kv_cache(model: nn.Module, scheme: KVCacheScheme) -> int:
    """Quantises what the model would cache from now on; returns the number of attention layers. See `check_kv_cache`.

    Undone by `detach_kv_cache` and by `restore`.
    """
    layers = check_kv_cache(model, scheme)
    configs = {id(m.config): m.config for _, m in layers if _needs_function(m, scheme)}
    for _, module in layers:
        module.kv_cache_scheme = scheme  # type: ignore[assignment]
        if is_mla(module):
            norm: Any = module.kv_a_layernorm
            norm.cache_quantizer = CacheQuantizer(scheme.cache)
            norm.cache_hook = norm.register_forward_hook(quantize_output)
            if scheme.rope is not None:
                module.cache_quantizer = RopeQuantizer(scheme.rope, int(module.qk_rope_head_dim))  # type: ignore[arg-type]
        else:
            module.cache_quantizer = KeyValueQuantizer(scheme.cache)
    if configs:
        register_attention_implementations()
    for config in configs.values():
        config._attn_implementation = PREFIX + config._attn_implementation  # type: ignore[union-attr, operator]
    return len(layers)


def detach_kv_cache(model: nn.Module) -> None:
    """Takes the quantisers out; does nothing for a model without them."""
    for _, module in attention_layers(model):
        if module.__dict__.pop("kv_cache_scheme", None) is None:
            continue
        if is_mla(module):
            norm: Any = module.kv_a_layernorm
            norm.__dict__.pop("cache_hook").remove()
            del norm.cache_quantizer
        if hasattr(module, "cache_quantizer"):
            del module.cache_quantizer
            config: Any = module.config
            config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)


def kv_cache_of(model: nn.Module) -> KVCacheScheme | None:
    """The scheme that `attach_kv_cache` put into the model, None without one."""
    found = (getattr(module, "kv_cache_scheme", None) for _, module in attention_layers(model))
    return next((scheme for scheme in found if scheme is not None), None)


def cache_quantizers(model: nn.Module) -> Iterator[tuple[str, CacheQuantizer]]:
    """Every cached tensor's quantiser, with its name in the model."""
    for name, module in model.named_modules():
        if isinstance(module, CacheQuantizer):
            yield name, module


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Self-attention of the language model, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "self_attn" and part_of(name, module) == "attention"
    ]


def is_mla(module: nn.Module) -> bool:
    """True for an attention that caches a latent."""
    return hasattr(module, "kv_a_layernorm") and hasattr(module, "kv_b_proj")


def caches_latent(model: nn.Module) -> bool:
    """True for a model with MLA."""
    return any(is_mla(module) for _, module in attention_layers(model))


def check_kv_cache(model: nn.Module, scheme: KVCacheScheme) -> list[tuple[str, nn.Module]]:
    """The attention layers that get a cache of this scheme; changes nothing.

    Raises ValueError for a model whose cache is not known here, a group that does not divide a cached vector, an
    attention implementation that cannot be wrapped, a model that has cache quantisers already.
    """
    layers = attention_layers(model)
    if not layers or not all(is_mla(m) or _has_keys_and_values(m) for _, m in layers):
        first = layers[0][0] if layers else "no module is called self_attn"
        raise ValueError(
            f"method.kv_cache: what {type(model).__name__} caches is not known ({first}); it works with MLA (DeepSeek "
            "V2, V3) and with k_proj and v_proj (Llama, Qwen, Mixtral): set method/kv_cache=off"
        )
    if kv_cache_of(model) is not None:
        raise ValueError("the model has KV-cache quantisers already; call detach_kv_cache(model) first")
    for name, module in layers:
        size: Any = module
        if is_mla(module):
            scheme.cache.check_width(size.kv_lora_rank, f"the latent of {name}")
            if scheme.rope is not None:
                scheme.rope.check_width(size.qk_rope_head_dim, f"the rope key of {name}")
        else:
            scheme.cache.check_width(size.head_dim, f"a key or value of {name}")
        if _needs_function(module, scheme):
            _check_function(name, module)
    return layers


def _check_function(name: str, module: nn.Module) -> None:
    implementation = getattr(module.config, "_attn_implementation", None)
    source = sys.modules[type(module).__module__]
    if not hasattr(source, "ALL_ATTENTION_FUNCTIONS"):
        raise ValueError(
            f"method.kv_cache: {name} ({type(module).__name__}) does not use transformers' attention interface, as "
            "remote code; load the model with transformers' own class, or set method/kv_cache=off"
        )
    if implementation not in ATTENTION:
        raise ValueError(
            f"method.kv_cache: attention {implementation!r} of {name} cannot be wrapped; set model.attention to one of "
            f"{', '.join(ATTENTION[:2])}"
        )


def _has_keys_and_values(module: nn.Module) -> bool:
    return all(hasattr(module, key) for key in ("k_proj", "v_proj", "head_dim"))


def _needs_function(module: nn.Module, scheme: KVCacheScheme) -> bool:
    return not is_mla(module) or scheme.rope is not None


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Eager attention is no entry of the interface: every modeling file has its own."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def register_attention_implementations() -> None:
    """Adds the `qdeepseek_kv_*` names to transformers' attention and mask interfaces; harmless when repeated."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ATTENTION:
        attention: Callable[..., Any] = _eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS.register(PREFIX + name, with_quantized_cache(attention))
        ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
