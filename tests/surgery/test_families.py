"""Part of the model by module name and class."""

import pytest
from torch import nn

from qdeepseek.surgery.families import is_mtp_parameter, part_of


class TopkRouter(nn.Module):
    pass


class RMSNorm(nn.Module):
    pass


LINEAR, EMBEDDING = nn.Linear(2, 2), nn.Embedding(2, 2)


@pytest.mark.parametrize(
    ("name", "module", "part"),
    [
        ("model.layers.0.self_attn.kv_a_proj_with_mqa", LINEAR, "attention"),
        ("model.layers.0.self_attn.kv_a_layernorm", RMSNorm(), "norm"),
        ("model.layers.0.mlp.down_proj", LINEAR, "mlp"),
        ("model.layers.3.mlp.gate", TopkRouter(), "router"),
        ("model.layers.3.mlp.gate", LINEAR, "router"),
        ("model.layers.3.mlp.gate_proj", LINEAR, "mlp"),
        ("model.layers.3.mlp.shared_expert_gate", LINEAR, "router"),
        ("model.layers.3.block_sparse_moe.gate", LINEAR, "router"),
        ("model.layers.3.mlp.experts.17.up_proj", LINEAR, "routed_experts"),
        ("model.layers.3.mlp.shared_experts.up_proj", LINEAR, "shared_experts"),
        ("model.layers.3.mlp.shared_expert.up_proj", LINEAR, "shared_experts"),
        ("model.embed_tokens", EMBEDDING, "embedding"),
        ("lm_head", LINEAR, "head"),
        ("model.vision_model.encoder.layers.0.self_attn.q_proj", LINEAR, "vision"),
        ("model.vision_model.encoder.layers.0.layer_norm1", nn.LayerNorm(2), "vision"),
        ("model.aligner.linear1", LINEAR, "aligner"),
        ("model.language_model.layers.0.self_attn.q_proj", LINEAR, "attention"),
        ("model.mtp.0.self_attn.q_proj", LINEAR, "mtp"),
        ("model.layers.61.eh_proj", LINEAR, "mtp"),
        ("score", LINEAR, "other"),
    ],
)
def test_part_of(name, module, part):
    assert part_of(name, module) == part


def test_fused_experts_are_found_by_their_tensors(tiny_model):
    experts = tiny_model.model.layers[1].mlp.experts
    assert part_of("anything.at.all", experts) == "routed_experts"


@pytest.mark.parametrize(
    ("name", "mtp"),
    [
        ("model.layers.61.self_attn.o_proj.weight", True),
        ("model.layers.60.self_attn.o_proj.weight", False),
        ("model.layers.61.shared_head.norm.weight", True),
        ("model.norm.weight", False),
    ],
)
def test_mtp_parameters_are_the_layers_after_the_last(name, mtp):
    assert is_mtp_parameter(name, 61) is mtp
