"""Rotation leaves the function alone: fp64 logits and routing before and after, and flatter activations."""

import copy

import pytest
import torch
from torch.overrides import TorchFunctionMode

from qdeepseek.ptq.rtn import round_to_nearest
from qdeepseek.surgery import prepare, untie
from qdeepseek.surgery.rotate import PARTS, Rotation, rotate
from tests.surgery.surgery_models import load_recipe, tiny_moe


class EverythingFp64(TorchFunctionMode):
    """Norms, softmax and routers of transformers compute in fp32 by name; here float32 means float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = {torch.float32: torch.float64}
        if func is torch.Tensor.float:
            return args[0].double()
        args = [wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {k: wide.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def family(name: str):
    """A random fp64 model with random gammas and biases, since those that are 1 and 0 hide mistakes."""
    import transformers as t

    size = {"vocab_size": 96, "hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    grouped = {**size, "num_key_value_heads": 2, "intermediate_size": 64, "tie_word_embeddings": False}
    mla = {
        **size, "num_key_value_heads": 4, "intermediate_size": 80, "moe_intermediate_size": 48, "kv_lora_rank": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "n_group": 2, "topk_group": 1,
        "attention_bias": True, "tie_word_embeddings": False,
    }  # fmt: skip
    configs = {
        "deepseek_v3": lambda: t.DeepseekV3Config(**mla, q_lora_rank=40),
        "deepseek_v3_no_q_lora": lambda: t.DeepseekV3Config(**mla, q_lora_rank=None),
        "deepseek_v2": lambda: t.DeepseekV2Config(**mla, q_lora_rank=40, topk_method="group_limited_greedy"),
        "deepseek_v2_lite": lambda: t.DeepseekV2Config(**mla, q_lora_rank=None, topk_method="greedy"),
        "llama": lambda: t.LlamaConfig(**grouped),
        "llama_biases": lambda: t.LlamaConfig(**grouped, attention_bias=True, mlp_bias=True, head_dim=20),
        "qwen2": lambda: t.Qwen2Config(**grouped),
    }
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(configs[name](), attn_implementation="sdpa")
    model.set_experts_implementation("eager")  # grouped_mm has no fp64
    model = model.double().eval()
    for key, p in model.named_parameters():
        if p.ndim == 1:
            p.data.normal_(1.0 if "norm" in key else 0.0, 0.5)
        else:
            p.data.normal_(0.0, 0.15)
    return model


FAMILIES = ["deepseek_v3", "deepseek_v3_no_q_lora", "deepseek_v2", "deepseek_v2_lite", "llama", "llama_biases", "qwen2"]


def run(model):
    """Logits in fp64, and the experts chosen by every router."""
    chosen, hooks = [], []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            hooks.append(module.register_forward_hook(lambda _m, _i, out: chosen.append(out[-1].sort(-1).values)))
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), EverythingFp64():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return logits, chosen


@pytest.mark.parametrize("parts", [PARTS, ()], ids=["rotated", "folded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_function_and_routing_are_preserved(name, parts):
    model = family(name)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    logits, chosen = run(model)
    report = rotate(model, seed=3, parts=parts)
    after, chosen_after = run(model)
    assert logits.dtype == torch.float64
    assert (after - logits).abs().max() < 1e-9 < logits.std()
    assert len(chosen) == len(chosen_after) == ("deepseek" in name)
    assert all(torch.equal(a, b) for a, b in zip(chosen, chosen_after))
    parameters = dict(model.named_parameters())
    assert all(bool((parameters[key] == 1).all()) for key in report.folded)
    assert {key for key in parameters if "norm" in key} == set(report.folded)
    changed = {key for key, p in parameters.items() if not torch.equal(p, before[key])}
    assert changed == set(report.folded) | set(report.rotated)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2"])
def test_what_is_rotated(name):
    report = rotate(family(name))
    if name == "qwen2":
        assert report.sizes == {"hidden": 96, "value": 24}
        assert report.rotated["model.layers.1.self_attn.v_proj.weight"] == ("gamma", "hidden", "value")
        assert report.rotated["model.layers.1.self_attn.v_proj.bias"] == ("value",)
        assert "model.layers.1.self_attn.q_proj.bias" not in report.rotated
    else:
        assert report.sizes == {"hidden": 96, "q_latent": 40, "kv_latent": 32, "value": 24}
        assert report.rotated["model.layers.1.mlp.gate.weight"] == ("gamma", "hidden")
        assert report.rotated["model.layers.1.mlp.experts.down_proj"] == ("hidden",)
        assert report.rotated["model.layers.1.self_attn.kv_b_proj.weight"] == ("gamma", "kv_latent", "value")


@pytest.mark.parametrize("n", [1, 2, 7, 24, 128, 176])
def test_rotation_is_orthogonal_flat_and_seeded(n):
    r_NN = Rotation(n, 0).apply(torch.eye(n, dtype=torch.float64), 0)
    assert (r_NN.T @ r_NN - torch.eye(n, dtype=torch.float64)).abs().max() < 1e-13
    assert r_NN.abs().max() <= (2 / n) ** 0.5 + 1e-13
    x = torch.randn(3, n, 2, dtype=torch.float64)
    assert torch.allclose(Rotation(n, 0).apply(x, 1), torch.einsum("ij,ajb->aib", r_NN, x), atol=1e-12)
    if n > 24:
        other = Rotation(n, 1).apply(torch.eye(n, dtype=torch.float64), 0)
        assert not torch.equal(r_NN, other)


def test_fp32_and_bf16_models_keep_dtypes_and_routers(tiny_model):
    """The router stays fp32 in a bf16 model; an fp32 model moves by rounding alone."""
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = tiny_model(ids).logits
        half = copy.deepcopy(tiny_model).to(torch.bfloat16)
        for layer in half.model.layers[1:]:
            layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.float()
        dtypes = {name: p.dtype for name, p in half.named_parameters()}
        rotate(half)
        rotate(tiny_model)
        after = tiny_model(ids).logits
    assert {name: p.dtype for name, p in half.named_parameters()} == dtypes
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


def test_rtn_w4a4_improves_with_outlier_channels(tiny_model):
    """Three stream channels ten times the others, undone by the columns of their readers: rotation spreads them."""
    model, outliers = tiny_model, [5, 40, 99]
    readers = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "gate_proj.weight", "up_proj.weight", "gate.weight",
               "gate_up_proj", "lm_head.weight")  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight[:, outliers] *= 10
        for name, p in model.named_parameters():
            if name.endswith(readers):
                p[..., outliers] /= 10
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
    kurtosis, error = [], []
    for turned in (False, True):
        student = copy.deepcopy(model)
        if turned:
            rotate(student)
        z, reference = first_projection(student, ids)
        kurtosis.append(float((z / z.pow(2).mean(-1, keepdim=True).sqrt()).pow(4).mean()))
        prepare(student, load_recipe("w4a4"))
        round_to_nearest(student)
        error.append(float((first_projection(student, ids)[1] - reference).pow(2).mean() / reference.pow(2).mean()))
    assert kurtosis[1] < 4 < 20 < kurtosis[0]
    assert 2 * error[1] < error[0]


def first_projection(model, ids):
    """Input and output of the first layer's q_a_proj."""
    seen = []
    hook = model.model.layers[0].self_attn.q_a_proj.register_forward_hook(lambda _m, x, y: seen.extend((x[0], y)))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return seen


def test_same_seed_same_weights():
    first, second, other = family("qwen2"), family("qwen2"), family("qwen2")
    rotate(first, seed=1), rotate(second, seed=1), rotate(other, seed=2)
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a, b)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def refused(model, match):
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=match):
        rotate(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))


def test_twice_is_refused(tiny_model):
    rotate(tiny_model)
    refused(tiny_model, "rotated already")


def test_prepared_is_refused(tiny_model):
    prepare(tiny_model, load_recipe("w4a16_g32"))
    refused(tiny_model, "rotate before prepare")


def test_another_family_is_refused():
    refused(tiny_moe("qwen3_moe"), "qwen3_moe.*deepseek_v3")


def test_unknown_parameters_are_refused():
    model = family("llama")
    model.model.layers[1].self_attn.q_norm = torch.nn.RMSNorm(24)
    refused(model, r"layers\.1\.self_attn\.q_norm\.weight")


def test_unknown_parts_are_refused(tiny_model):
    with pytest.raises(ValueError, match="'heads'"):
        rotate(tiny_model, parts=("heads",))


def test_no_weights_are_refused(tiny_model):
    with pytest.raises(ValueError, match="meta"):
        rotate(tiny_model.to("meta"))


def test_tied_is_refused_until_untied():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                    tie_word_embeddings=True)
    )  # fmt: skip
    refused(model, "surgery.untie")
    untie(model)
    rotate(model)


def test_saved_and_loaded_as_any_checkpoint(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    rotate(tiny_model)
    tiny_model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.to_dict().keys() == tiny_model.config.to_dict().keys()
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, tiny_model(ids).logits)
