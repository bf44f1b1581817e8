"""The model of a plan: on the meta device, from a config.json alone, and its dimensions as plain numbers.

The configuration is that of `model.scratch`, of the folder `model.path`, of the hub's cache, or, where none of these is
on this machine, the published one of the same name in qdeepseek/assets/architectures: facts of the checkpoint's
config.json, no weights. (`DeepseekV2Config()` alone is no model: it has 1407 inputs in each expert's down_proj.)
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qdeepseek.surgery.families import is_fused_experts
from qdeepseek.train.config import ConfigError
from qdeepseek.train.models import DTYPES, ModelConfig, keeps_fp32

SHIPPED = Path(__file__).parent.parent / "assets" / "architectures"
Kind = Literal["dense", "moe"]


@dataclass(frozen=True)
class Architecture:
    """What activations and operations depend on; widths in elements.

    query, value  width of a head in Q·K and in the sum of values; mla: latent attention, of ranks q_rank (0: none) and
                  kv_rank, with `rope` shared key dimensions
    kinds         of each decoder layer
    expert, shared  inputs of down_proj of a routed expert and of the shared ones together
    """

    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    query: int
    value: int
    mla: bool
    q_rank: int
    kv_rank: int
    rope: int
    kinds: tuple[Kind, ...]
    dense: int
    expert: int = 0
    shared: int = 0
    experts: int = 0
    top_k: int = 0
    extra_layers: int = 0  # multi-token prediction: in the checkpoint, not in the model


def read_config(model: ModelConfig) -> tuple[PretrainedConfig, str]:
    """Configuration and where it comes from. Raises ConfigError when it is nowhere on this machine."""
    if model.scratch is not None:
        values = dict(model.scratch)
        return AutoConfig.for_model(values.pop("model_type"), **values), "model.scratch"
    folder = Path(model.folder)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path {folder}: no config.json in it; the plan needs nothing else")
        return AutoConfig.from_pretrained(folder), str(folder / "config.json")
    local = folder.is_absolute() or model.folder.startswith(".")
    cached = None if local else try_to_load_from_cache(model.folder, "config.json", revision=model.revision)
    if isinstance(cached, str):
        return AutoConfig.from_pretrained(Path(cached).parent), cached
    shipped = SHIPPED / f"{folder.name}.json"
    if local or not shipped.is_file():
        known = ", ".join(sorted(f.stem for f in SHIPPED.glob("*.json")))
        raise ConfigError(
            f"model.path {model.folder}: no such folder, not in the hub's cache, and no shipped architecture has its "
            f"name (there: {known}); give a folder with its config.json"
        )
    values = json.loads(shipped.read_text())
    return AutoConfig.for_model(values.pop("model_type"), **values), f"published values, {shipped.name}"


def meta_model(model: ModelConfig) -> tuple[PreTrainedModel, str]:
    """The model without storage, routers in fp32 as a loaded one has them, and where its configuration comes from."""
    config, source = read_config(model)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # FP8 is dequantised when it is loaded
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, dtype=DTYPES[model.dtype], attn_implementation=model.attention)
    for name, tensor in [*built.named_parameters(), *built.named_buffers()]:
        if keeps_fp32(built, name):
            tensor.data = tensor.data.float()
    return built.train(), source


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Dimensions of a DeepSeek, Llama or Qwen decoder. Raises ConfigError for a model without decoder layers."""
    c: Any = model.config.get_text_config()
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise ConfigError(f"model_type {c.model_type}: no decoder layers in it; the plan knows text decoders")
    mla = getattr(c, "kv_lora_rank", None) is not None
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kinds: tuple[Kind, ...] = tuple(
        "moe" if any(is_fused_experts(m) for m in layer.modules()) else "dense" for layer in layers
    )
    moe = "moe" in kinds
    expert = (getattr(c, "moe_intermediate_size", None) or c.intermediate_size) if moe else 0
    shared = (getattr(c, "n_shared_experts", 0) or 0) * expert or getattr(c, "shared_expert_intermediate_size", 0) or 0
    experts = int(getattr(c, "n_routed_experts", None) or getattr(c, "num_experts", None) or 0)
    return Architecture(
        hidden=c.hidden_size, vocab=c.vocab_size, heads=c.num_attention_heads, kv_heads=c.num_key_value_heads,
        query=c.qk_nope_head_dim + c.qk_rope_head_dim if mla else head, value=c.v_head_dim if mla else head, mla=mla,
        q_rank=(c.q_lora_rank or 0) if mla else 0, kv_rank=c.kv_lora_rank if mla else 0,
        rope=c.qk_rope_head_dim if mla else 0, kinds=kinds, dense=c.intermediate_size, expert=expert,
        shared=shared if moe else 0, experts=experts if moe else 0, top_k=c.num_experts_per_tok if moe else 0,
        extra_layers=getattr(c, "num_nextn_predict_layers", 0) or 0,
    )  # fmt: skip
