"""Models for surgery: real configurations on the meta device, tiny random ones on the CPU, recipes from conf/quant."""

import json
from functools import cache
from pathlib import Path

import torch
import yaml

from qdeepseek.surgery import Recipe

CONFIGS = Path(__file__).parent / "configs"
CONF_QUANT = Path(__file__).parents[2] / "conf" / "quant"
RECIPES = sorted(path.stem for path in CONF_QUANT.glob("*.yaml"))
REAL_MODELS = sorted(path.stem for path in CONFIGS.glob("*.json"))


def recipe_config(name: str) -> dict:
    return yaml.safe_load((CONF_QUANT / f"{name}.yaml").read_text())


def load_recipe(name: str) -> Recipe:
    return Recipe.from_config(recipe_config(name))


@cache
def meta_model(name: str):
    """The whole model of tests/surgery/configs/NAME.json without weights; shared, so do not change it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads((CONFIGS / f"{name}.json").read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tiny_moe(kind: str):
    """A random MoE of another family, every dimension a multiple of 32."""
    import transformers as t

    size = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    configs = {
        "mixtral": lambda: t.MixtralConfig(
            **size, intermediate_size=64, num_hidden_layers=2, num_key_value_heads=1, num_local_experts=4),
        "qwen2_moe": lambda: t.Qwen2MoeConfig(
            **size, **experts, intermediate_size=64, shared_expert_intermediate_size=64, num_key_value_heads=1,
            num_experts=4),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **size, **experts, intermediate_size=64, num_key_value_heads=1, head_dim=32, num_experts=4),
        "deepseek_v2": lambda: t.DeepseekV2Config(
            **size, **experts, intermediate_size=96, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1,
            first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32,
            v_head_dim=32, n_group=1, topk_group=1),
        "deepseek_v4": lambda: t.DeepseekV4Config(
            **size, **{**experts, "num_hidden_layers": 3}, num_key_value_heads=1, n_routed_experts=4, q_lora_rank=32,
            head_dim=32, qk_rope_head_dim=16, o_groups=2, o_lora_rank=32, index_n_heads=2, index_head_dim=32),
    }  # fmt: skip
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(configs[kind]()).eval()
