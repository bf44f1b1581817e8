"""Calibration batches, recipes, and a model with one dense and one MoE layer."""

import copy
from pathlib import Path

import pytest
import torch
import yaml

from qdeepseek.surgery import Recipe

QUANT = Path(__file__).parents[2] / "conf" / "quant"


@pytest.fixture
def load_recipe():
    """Recipe of conf/quant by name, with single values replaced: load_recipe("w4a4", ("rules", "x"), {...})."""

    def load(name, *changes):
        config = yaml.safe_load((QUANT / f"{name}.yaml").read_text())
        for (*path, last), value in changes:
            target = config
            for key in path:
                target = target[key]
            target[last] = value
        return Recipe.from_config(config)

    return load


@pytest.fixture
def batches():
    """Three batches of 4 × 64 tokens; the labels are to be ignored."""
    ids = torch.randint(0, 256, (12, 64), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": part, "labels": part} for part in ids.split(4)]


@pytest.fixture
def small_model(tiny_config):
    """tests/conftest.py's model with two layers, hidden size 64 and four experts: GPTQ takes a fraction of a second."""
    from transformers import DeepseekV3ForCausalLM

    config = copy.deepcopy(tiny_config)
    config.update({
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
        "n_routed_experts": 4, "num_local_experts": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32,
    })  # fmt: skip
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).eval()
