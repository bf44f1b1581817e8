"""The memory model: DeepSpeed's own estimate of model states, a step worked out by hand, and what each option does."""

import os
from dataclasses import replace

import pytest

from qdeepseek.plan.activations import saved
from qdeepseek.plan.architecture import Architecture
from qdeepseek.plan.blocks import Block
from qdeepseek.plan.memory import STAGES, Job, memory, moments, states
from qdeepseek.quant.grid import PIECE

ARCHITECTURE = Architecture(
    hidden=64, vocab=100, heads=4, kv_heads=4, query=16, value=16, mla=False, q_rank=0, kv_rank=0, rope=0,
    kinds=("dense", "dense"), dense=128,
)  # fmt: skip
PLAIN = (Block("embedding", 6_400), Block("layer 0", 40_000), Block("layer 1", 40_000), Block("head", 6_464))
QUANTISED = (
    PLAIN[0],
    *(replace(b, quantised=38_000, largest=8_000, learned=8_000, scales=1_000) for b in PLAIN[1:3]),
    PLAIN[3],
)
P = 92_864
JOB = Job(gpus=8, length=32, precision="bf16-true", teacher=False, checkpointing=False, bucket=0, live=0)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 8), (4, 8)])
def test_model_states_against_deepspeed(nodes, gpus):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    job = replace(JOB, nodes=nodes, gpus=gpus)
    _, two = estimate_zero2_model_states_mem_needs(P, gpus, nodes, cpu_offload=False)
    assert states(PLAIN, job, "zero2").model_states == pytest.approx(two, abs=1)
    _, three, layer = estimate_zero3_model_states_mem_needs(P, 40_000, gpus, nodes, cpu_offload=False)
    parts = states(PLAIN, job, "zero3")  # the estimator leaves out the bf16 gradients of a rank's part
    assert parts.model_states - parts.gradients == pytest.approx(three, abs=1)
    assert parts.gradients == 2 * P / (nodes * gpus)
    host, device, _ = estimate_zero3_model_states_mem_needs(P, 40_000, gpus, nodes, additional_buffer_factor=1)
    offloaded = states(PLAIN, job, "zero3_offload")
    assert offloaded.model_states == device == layer
    assert offloaded.host == pytest.approx(host, abs=1)


def test_a_step_by_hand():
    job = Job(length=32, batch=2, precision="32-true", teacher=False, checkpointing=False)
    found = memory(QUANTISED, ARCHITECTURE, job, "ddp")
    layer = 64 * saved(ARCHITECTURE, "dense", "full", 32)
    assert found.weights == 4 * P and found.optimizer == 8 * P and found.communication == 0
    assert found.scales == 16 * 2_000
    loss = 2 * layer + 64 * 64 * 12 + 2 * 4 * 38_000 + 12 * 64 * 100  # activations, head's norm, w_hat, logits
    working = 12 * 8_000 + 64 * (2 * 256 * 4 + 64 * 4)  # fake-quant of the largest weight, gradients of activations
    last = 2 * layer + 2 * 4 * 38_000 + 4 * (40_000 + 6_464) + working  # backward of layer 1
    first = layer + 4 * 38_000 + 4 * (2 * 40_000 + 6_464) + working
    assert found.total - found.weights - found.optimizer - found.scales == max(loss, last, first) == last


@pytest.mark.parametrize("stage", STAGES)
def test_what_options_do(stage):
    job = replace(JOB, batch=8)
    plain = memory(QUANTISED, ARCHITECTURE, job, stage)
    assert memory(QUANTISED, ARCHITECTURE, replace(job, checkpointing=True), stage).activations < plain.activations
    assert memory(QUANTISED, ARCHITECTURE, replace(job, recompute=True), stage).fake_quant < plain.fake_quant
    assert memory(QUANTISED, ARCHITECTURE, replace(job, cached=True), stage).fake_quant >= 2 * 76_000
    taught = memory(QUANTISED, ARCHITECTURE, replace(job, teacher=True), stage)
    share = {"ddp": 1, "zero1": 1, "zero2": 1, "zero3": 1 / 8, "zero3_offload": 0}[stage]
    assert taught.teacher == pytest.approx(2 * P * share)
    assert memory(QUANTISED, ARCHITECTURE, replace(job, length=64), stage).activations > plain.activations


def test_stages_take_less_and_less():
    totals = [memory(QUANTISED, ARCHITECTURE, replace(JOB, teacher=True), stage).total for stage in STAGES[1:]]
    assert totals == sorted(totals, reverse=True)


def test_fp32_weights_are_their_own_master_at_stage_3():
    full = replace(JOB, precision="bf16-mixed")
    assert memory(PLAIN, ARCHITECTURE, full, "zero3").optimizer == 8 * P / 8
    assert memory(PLAIN, ARCHITECTURE, full, "zero2").optimizer == 12 * P / 8
    assert memory(PLAIN, ARCHITECTURE, full, "zero3").weights == 4 * P / 8


def test_autocast_keeps_bf16_copies_of_what_it_multiplies():
    blocks = (QUANTISED[0], *(replace(b, kept=2_000) for b in QUANTISED[1:3]), QUANTISED[3])
    mixed = replace(JOB, precision="bf16-mixed")

    def copies(**changes):
        return memory(blocks, ARCHITECTURE, replace(mixed, **changes), "zero2").fake_quant

    assert copies() == 2 * 2 * (38_000 + 2_000)
    assert copies(recompute=True) == 2 * 2 * 2_000
    assert copies(cached=True, recompute=True) == copies() + 4 * 76_000


def test_fake_quant_of_a_large_weight_takes_pieces_of_it():
    def temporary(job, **changes):
        blocks = (QUANTISED[0], *(replace(b, **changes) for b in QUANTISED[1:3]), QUANTISED[3])
        return memory(blocks, ARCHITECTURE, job, "zero2").temporary

    job = replace(JOB, precision="32-true")
    large = {"largest": 10 * PIECE, "learned": 10 * PIECE}
    assert temporary(job, **large) == 12 * PIECE
    assert temporary(job, largest=10 * PIECE, learned=0) == 6 * PIECE
    assert temporary(job, largest=PIECE, learned=0) == 2 * PIECE
    assert temporary(replace(job, precision="bf16-mixed"), **large) == 4 * 10 * PIECE  # w_hat in fp32 before its cast


def test_arithmetic_of_a_precision():
    for precision, weight_bytes, arithmetic, parameter in (
        ("32-true", 4, "full", 4), ("32-true", 2, "bf16", 2), ("bf16-mixed", 4, "mixed", 4),
        ("bf16-mixed", 2, "bf16", 2), ("bf16-true", 4, "bf16", 2),
    ):  # fmt: skip
        job = Job(precision=precision, weight_bytes=weight_bytes)
        assert (job.arithmetic, job.parameter_bytes) == (arithmetic, parameter)
    with pytest.raises(ValueError, match=r"trainer\.precision 16-mixed has no plan"):
        Job(precision="16-mixed")
    with pytest.raises(ValueError, match="nodes 0 must be at least 1"):
        Job(nodes=0)


def test_experts_in_chunks_by_hand():
    """What stage 3 gathers, copies and works on shrinks to one chunk; what the loss waits for has no experts in it."""
    moe = replace(ARCHITECTURE, kinds=("moe", "moe"), experts=8, top_k=2, expert=32, shared=32)
    layer = Block("layer 0", 60_000, routed=48_000, quantised=50_000, routed_quantised=48_000, largest=32_000,
                  largest_parameter=32_000)  # fmt: skip
    whole = (PLAIN[0], layer, replace(layer, name="layer 1"), PLAIN[3])
    parts = tuple(replace(b, chunks=4, largest=b.largest // 4) for b in whole)
    assert [b.gathered for b in parts] == [6_400, 24_000, 24_000, 6_464] and not parts[0].chunked
    job = Job(gpus=8, length=32, precision="32-true", teacher=False, checkpointing=True, bucket=0, live=0)
    a, b = (memory(blocks, moe, job, "zero3") for blocks in (whole, parts))
    assert (a.gathered, b.gathered) == (2 * 4 * 60_000, 2 * 4 * 24_000)
    scaled = tuple(replace(b, scales=500, routed_scales=400 if b.routed else 0) for b in parts)
    assert memory(scaled, moe, job, "zero3").gathered == 2 * 4 * (24_000 + 100 + 100)
    assert (a.fake_quant, b.fake_quant) == (4 * 50_000, 4 * (2_000 + 12_000))
    assert b.activations == a.activations and b.weights == a.weights
    job = replace(job, checkpointing=False)
    a, b = (memory(blocks, moe, job, "zero3") for blocks in (whole, parts))
    per_token = 2 * ((2 * 64 + 4 * 32) * 4 + 3 * 8 + 4)
    assert a.moment == b.moment == "backward of layer 1"
    assert a.activations - b.activations == 32 * per_token, "one layer's rows of two"
    assert (a.fake_quant, b.fake_quant) == (2 * 4 * 50_000, 2 * 4 * 2_000 + 4 * 12_000)


def test_the_step_s_gradient_is_not_there_in_the_backward():
    job = replace(JOB, length=8)
    for stage, step in (("zero1", 4 * P / 8), ("zero3", 4 * P / 8), ("zero3_offload", 0)):
        *working, last = moments(PLAIN, ARCHITECTURE, job, stage)
        assert last.moment == "optimizer step" and last.step == step and last.gathered == last.activations == 0
        assert all(m.step == 0 for m in working) and memory(PLAIN, ARCHITECTURE, job, stage) in (*working, last)
    huge = (Block("layer 0", 80 * 10**9),)
    step = moments(huge, replace(ARCHITECTURE, kinds=("dense",)), job, "zero3")[-1]
    assert step.step == 4 * 10**9, "one sub-group at a time"
    job = replace(job, sub_group=10**6)
    assert moments(huge, replace(ARCHITECTURE, kinds=("dense",)), job, "zero3")[-1].step == 4 * 10**6
