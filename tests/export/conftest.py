"""Small models of every family and recipes from conf/quant with changes by dotted name."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from qdeepseek.surgery import Recipe, prepare

CONF = Path(__file__).parents[2] / "conf" / "quant"
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
DEEPSEEK = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
FAMILIES = {
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SMALL, **DEEPSEEK),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**SMALL, **DEEPSEEK),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SMALL, **MOE, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **MOE),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
}


def build_recipe(name: str = "w4a16_g32", **changes: object) -> Recipe:
    """A recipe of conf/quant with `schemes__main__weight__bits=3`-like changes."""
    config = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = config
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return Recipe.from_config(config)


def build_model(family: str = "deepseek_v3", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A random model whose router has a bias and whose projections have outliers."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.1)
            elif tensor.ndim > 1 and "proj" in name:
                tensor.view(-1)[::97] *= 8
    return model


def empty_like_export(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The model that an export describes, without its weights, as a caller of the loader builds it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    return model


@pytest.fixture
def make_recipe():
    return build_recipe


@pytest.fixture
def make_model():
    return build_model


@pytest.fixture
def empty_model():
    return empty_like_export


@pytest.fixture
def make_prepared():
    def make(recipe: Recipe | None = None, family: str = "deepseek_v3", dtype: torch.dtype = torch.float32):
        model = build_model(family, dtype)
        prepare(model, recipe or build_recipe())
        return model

    return make


@pytest.fixture(scope="session")
def ids():
    return torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def copied():
    return copy.deepcopy
