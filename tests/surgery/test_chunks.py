"""Experts in chunks are the experts: same outputs and gradients, coverage, scheduler groups and exported bytes."""

import copy

import pytest
import torch

from qdeepseek.export.compressed_tensors import export
from qdeepseek.export.verify import verify
from qdeepseek.layers import ExpertChunks
from qdeepseek.surgery import autocast_experts, chunk_experts, plan, prepare, quantized_tensors
from qdeepseek.surgery.fusion import fusion_groups, keep_levels
from tests.surgery.surgery_models import load_recipe, meta_model, tiny_moe

FAMILIES = ["deepseek_v2", "qwen2_moe", "qwen3_moe", "mixtral"]


def pair(family: str, chunks: int):
    whole = tiny_moe(family)
    parts = copy.deepcopy(whole)
    chunk_experts(parts, chunks)
    return whole, parts


def by_whole_name(named: dict) -> dict:
    """Chunks laid end to end, by the name of what they are chunks of."""
    found: dict = {}
    for name, tensor in named.items():
        head, chunk, rest = name.partition(".experts.from_")
        found.setdefault(f"{head}.experts.{rest.partition('.')[2]}" if chunk else name, []).append(tensor)
    return {name: torch.cat(tensors) if len(tensors) > 1 else tensors[0] for name, tensors in found.items()}


def step(model, checkpointing: bool = False):
    """Logits and gradients of one batch."""
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(24).view(2, 12) * 7 % 96
    logits = model(ids, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), by_whole_name({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_whole(family, chunks, checkpointing):
    whole, parts = pair(family, chunks)
    prepare(whole, load_recipe("w4a8"))
    prepare(parts, load_recipe("w4a8"))
    (logits, grads), (found, others) = step(whole), step(parts, checkpointing)
    assert any(isinstance(module, ExpertChunks) for module in parts.modules())
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)
    assert grads.keys() == others.keys() and any(name.endswith("_quantizer.scale") for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("experts", ["batched_mm", "eager"])
def test_other_implementations(experts):
    whole, parts = pair("deepseek_v2", 2)
    for model in (whole, parts):
        prepare(model, load_recipe("w4a16_g32"), experts=experts)
    (logits, grads), (found, others) = step(whole), step(parts)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_an_unquantised_model():
    whole, parts = pair("deepseek_v2", 4)
    autocast_experts(parts)
    (logits, grads), (found, others) = step(whole), step(parts)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)
    assert by_whole_name(dict(parts.named_parameters())).keys() == dict(whole.named_parameters()).keys()
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_chunk_that_no_token_chose_has_gradients_of_zero():
    _, parts = pair("deepseek_v2", 4)
    prepare(parts, load_recipe("w4a16_g32"))
    model = next(m for m in parts.modules() if isinstance(m, ExpertChunks))
    x = torch.randn(5, 64, requires_grad=True)
    model(x, torch.zeros(5, 2, dtype=torch.long), torch.full((5, 2), 0.5)).sum().backward()
    grads = [chunk.gate_up_proj.grad.abs().sum() for chunk in model.children()]
    assert grads[0] > 0 and grads[1:] == [0, 0, 0] and x.grad.isfinite().all()


def test_rules_coverage_and_scheduler_go_by_the_whole():
    whole, parts = pair("qwen3_moe", 2)
    recipe = load_recipe("w4_experts_only")
    assert plan(parts, recipe).to_dict() == plan(whole, recipe).to_dict()
    for model in (whole, parts):
        prepare(model, recipe)
    assert plan(parts, recipe).to_dict() == plan(whole, recipe).to_dict()
    assert [group.name for group in fusion_groups(parts)] == [group.name for group in fusion_groups(whole)]
    assert [len(group.tensors) for group in fusion_groups(parts)] == [4, 4]


def test_levels_that_are_kept_compute_the_same():
    _, parts = pair("qwen3_moe", 2)
    recipe = load_recipe("w4_experts_only")
    prepare(parts, recipe)
    first, second = fusion_groups(parts)
    first.set_level("int8")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        before = parts(ids, use_cache=False).logits
        kept = keep_levels(
            parts, recipe, dict.fromkeys(first.modules, "int8") | dict.fromkeys(second.modules, "target")
        )
        assert torch.equal(parts(ids, use_cache=False).logits, before)
    assert [rule.name for rule in kept.rules][:2] == [f"int8_{first.name}", recipe.rules[0].name]


def test_a_model_without_weights():
    model, recipe = copy.deepcopy(meta_model("deepseek_v3")), load_recipe("w4a16_g128")
    chunk_experts(model, 8)
    prepare(model, recipe, initialize=False)
    shapes = {tensor.weight.shape for tensor in quantized_tensors(model) if ".experts.from_" in tensor.name}
    assert shapes == {(32, 4096, 7168), (32, 7168, 2048)}
    assert plan(model, recipe).parameters == plan(meta_model("deepseek_v3"), recipe).parameters


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral"])
def test_exports_are_the_same_bytes(family, tmp_path):
    recipe = load_recipe("w4a16_g32")
    for name, model in zip(("whole", "parts"), pair(family, 2), strict=True):
        prepare(model, recipe)
        export(model, tmp_path / name, recipe=recipe, dtype=torch.bfloat16)
        verify(tmp_path / name, model)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "parts").iterdir())
    for file in files:
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes(), file


def test_a_number_that_does_not_divide_the_experts_is_refused():
    model = tiny_moe("deepseek_v2")
    with pytest.raises(ValueError, match=r"expert_chunks 3 does not divide the 4 experts of .*; use one of 1, 2, 4"):
        chunk_experts(model, 3)
    assert not any(isinstance(module, ExpertChunks) for module in model.modules())


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="no fused routed experts; leave it at 1"):
        chunk_experts(copy.deepcopy(meta_model("r1_distill_qwen_7b")), 2)
