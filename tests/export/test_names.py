"""Checkpoint names against what transformers itself writes."""

import pytest
import torch
import transformers
from safetensors import safe_open

from qdeepseek.export.names import (
    MIXTRAL,
    ModelName,
    expert_module,
    is_fused,
    layout_of,
    parts_of,
    rows_of,
    to_checkpoint,
    to_model,
)

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
DEEPSEEK = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CONFIGS = {
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**SMALL, **DEEPSEEK),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SMALL, **DEEPSEEK),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=32),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=32),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
}


def unfused(model, layout) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not is_fused(name):
            tensors[to_checkpoint(name, layout)] = tensor
            continue
        for expert, slice_OI in enumerate(tensor):
            for part in parts_of(name):
                tensors[f"{expert_module(name, expert, part, layout)}.weight"] = rows_of(part, slice_OI)
    return tensors


@pytest.mark.parametrize("model_type", CONFIGS)
def test_names_and_values_are_those_of_save_pretrained(model_type, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[model_type]())
    model.save_pretrained(tmp_path)
    layout = layout_of(model.config.model_type)
    ours = unfused(model, layout)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(ours)
        assert all(torch.equal(file.get_tensor(name), ours[name]) for name in ours)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_parsing_returns_every_parameter(model_type):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[model_type]())
    layout = layout_of(model.config.model_type)
    assert {to_model(name, layout).parameter for name in unfused(model, layout)} == set(model.state_dict())


def test_expert_names():
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert expert_module(name, 3, "up", layout_of("deepseek_v3")) == "model.layers.1.mlp.experts.3.up_proj"
    assert expert_module(name, 3, "up", MIXTRAL) == "model.layers.1.block_sparse_moe.experts.3.w3"
    parsed = to_model("model.layers.1.mlp.experts.12.down_proj.weight", layout_of("deepseek_v3"))
    assert parsed == ModelName("model.layers.1.mlp.experts.down_proj", 12, "down")
    shared = "model.layers.1.mlp.shared_experts.down_proj.weight"
    assert to_model(shared, layout_of("deepseek_v3")).parameter == shared and not is_fused(shared)


def test_unknown_family():
    assert layout_of("llama", fused=False).gate == "gate_proj"
    with pytest.raises(ValueError, match="model_type 'deepseek_v4' has fused experts and no entry"):
        layout_of("deepseek_v4")
