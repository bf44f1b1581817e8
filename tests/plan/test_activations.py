"""The formula of saved activations against what autograd saves, tensor by tensor, and the meta models against facts."""

import pytest
import torch

from qdeepseek.plan.activations import saved
from qdeepseek.plan.architecture import SHIPPED, architecture_of, meta_model
from qdeepseek.train.config import ConfigError
from qdeepseek.train.models import ModelConfig, load_model

MLA = {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4,
       "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
       "first_k_dense_replace": 1}  # fmt: skip
BASE = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False}  # fmt: skip
MODELS = {
    "qwen2": {**BASE, "model_type": "qwen2", "num_key_value_heads": 2},
    "llama": {**BASE, "model_type": "llama", "num_key_value_heads": 4},
    "v2": {**BASE, **MLA, "model_type": "deepseek_v2", "n_shared_experts": 2, "q_lora_rank": None,
           "topk_method": "greedy"},
    "v3": {**BASE, **MLA, "model_type": "deepseek_v3", "n_shared_experts": 1, "q_lora_rank": 48, "n_group": 1,
           "topk_group": 1},
}  # fmt: skip
BATCH, LENGTH = 2, 32


def kept_bytes(model: torch.nn.Module, layer: int) -> int:
    """Bytes that the forward of one decoder layer adds to what autograd keeps, weights not counted."""
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    seen: dict[int, torch.Tensor] = {}
    start: list[set[int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    target = model.model.layers[layer]
    target.register_forward_pre_hook(lambda *_: start.append(set(seen)))
    target.register_forward_hook(lambda *_: start.append(set(seen)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.model(input_ids=torch.randint(0, 64, (BATCH, LENGTH)), use_cache=False)
    before, after = start
    return sum(seen[key].untyped_storage().nbytes() for key in after - before)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_formula_against_autograd(name, dtype, layer):
    config = ModelConfig(scratch=MODELS[name], dtype=dtype)
    model = load_model(config).train()
    for module in model.modules():  # as a checkpoint is loaded: routers in fp32
        if "Router" in type(module).__name__:
            module.float()
    architecture = architecture_of(meta_model(config)[0])
    kind = architecture.kinds[layer]
    assert kind == ("moe" if name in ("v2", "v3") and layer else "dense")
    expected = BATCH * LENGTH * saved(architecture, kind, "full" if dtype == "float32" else "bf16", LENGTH)
    assert abs(kept_bytes(model, layer) / expected - 1) < 0.03


def test_attention_without_a_fused_kernel_keeps_its_weights():
    unequal = {**MODELS["v3"], "v_head_dim": 16}  # the CPU's fused kernel wants equal head widths
    config = ModelConfig(scratch=unequal)
    architecture = architecture_of(meta_model(config)[0])
    expected = BATCH * LENGTH * saved(architecture, "moe", "full", LENGTH, fused_attention=False)
    assert abs(kept_bytes(load_model(config).train(), 1) / expected - 1) < 0.03


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [  # as the model cards say, in 10⁹
        ("DeepSeek-V2-Lite", 15.7, 2.4),
        ("DeepSeek-V2", 236, 21),
        ("DeepSeek-V3", 671, 37),
        ("DeepSeek-R1-Distill-Qwen-7B", 7.62, 7.07),
        ("DeepSeek-R1-Distill-Qwen-1.5B", 1.78, 1.54),
        ("DeepSeek-R1-Distill-Llama-8B", 8.03, 7.5),
        ("deepseek-coder-6.7b-instruct", 6.74, 6.61),
    ],
)
def test_shipped_architectures(name, parameters, active):
    from qdeepseek.plan.blocks import blocks_of
    from qdeepseek.plan.time import active_parameters
    from qdeepseek.surgery import Recipe, plan

    model, source = meta_model(ModelConfig(path=f"deepseek-ai/{name}"))
    assert source == f"published values, {name}.json"
    assert all(p.is_meta for p in model.parameters()) and not hasattr(model.config, "quantization_config")
    coverage = plan(model, Recipe("off", (), min_expert_share=0))
    assert coverage.parameters / 1e9 == pytest.approx(parameters, rel=5e-3)
    assert active_parameters(blocks_of(coverage), architecture_of(model)) / 1e9 == pytest.approx(active, rel=0.07)


def test_every_hub_name_of_the_configuration_has_an_architecture():
    from tests.train.test_config import CONF

    paths = [line.split()[1] for f in (CONF / "model").glob("*.yaml") for line in f.read_text().splitlines()
             if line.startswith("path: deepseek-ai")]  # fmt: skip
    assert {p.split("/")[1] for p in paths} == {f.stem for f in SHIPPED.glob("*.json")}


def test_a_folder_with_a_config_alone_and_nothing_at_all(tmp_path):
    built, _ = meta_model(ModelConfig(scratch=MODELS["v3"]))
    built.config.save_pretrained(tmp_path)
    model, source = meta_model(ModelConfig(path=str(tmp_path)))
    assert source == str(tmp_path / "config.json")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in built.parameters())
    with pytest.raises(ConfigError, match="no shipped architecture has its name"):
        meta_model(ModelConfig(path="nobody/nothing"))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json in it"):
        meta_model(ModelConfig(path=str(tmp_path)))
