"""Fixtures shared by all tests: one small DeepSeek-V3 whose every dimension is stated."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_config():
    """The shipped model's configuration (hidden 128, 3 layers, 8 experts), without its weights."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        vocab_size=288, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.0,
        q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64,
        max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=256, eos_token_id=257, pad_token_id=258,
    )  # fmt: skip


@pytest.fixture
def tiny_model(tiny_config):
    """A freshly initialised fp32 model of `tiny_config`, seed 0."""
    import copy

    from transformers import DeepseekV3ForCausalLM

    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(copy.deepcopy(tiny_config)).eval()


@pytest.fixture(scope="session")
def tiny_folder(tiny_config, tmp_path_factory):
    """A `save_pretrained` folder of an untrained model of `tiny_config`, with the byte tokenizer."""
    from transformers import DeepseekV3ForCausalLM

    from qdeepseek.train.tokenizer import pretrained_byte_tokenizer

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(tiny_config).to(torch.bfloat16).save_pretrained(folder)
    pretrained_byte_tokenizer(tiny_config.max_position_embeddings).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_rows(tmp_path_factory):
    """A JSONL file of 300 short texts."""
    import json

    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"text": f"row {i}: the square of {i} is {i * i}, its cube is {i**3}."} for i in range(300)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
