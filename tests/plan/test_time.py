"""Operations, traffic and seconds of a step, worked out by hand."""

from dataclasses import replace

import pytest

from qdeepseek.plan.blocks import Block
from qdeepseek.plan.hardware import Hardware
from qdeepseek.plan.memory import STAGES, Job
from qdeepseek.plan.time import (
    FORWARD_PASSES,
    PASS_BYTES,
    active_parameters,
    collective_seconds,
    fake_quant_bytes,
    operations,
    step_time,
    traffic,
)
from tests.plan.test_memory import ARCHITECTURE, PLAIN, QUANTISED, P

HARDWARE = Hardware("unit", 80e9, 1e12, 1e11, 1e9, 1e9, 1e8, 1e9, 1e9, 1e12, reserve=0, mfu=0.5, efficiency=1.0)
JOB = Job(gpus=8, length=32, precision="bf16-true", teacher=False, checkpointing=False)


def test_operations_of_a_dense_model():
    assert active_parameters(PLAIN, ARCHITECTURE) == P - 6_400
    attention = 2 * 4 * 32 * 32 / 2  # layers · heads · (d_qk + d_v) · L / 2
    assert operations(PLAIN, ARCHITECTURE, JOB) == 6 * 32 * (86_464 + attention)
    more = replace(JOB, checkpointing=True, teacher=True)
    assert operations(PLAIN, ARCHITECTURE, more) == pytest.approx(10 / 6 * operations(PLAIN, ARCHITECTURE, JOB))


def test_a_token_meets_its_experts_alone():
    moe = replace(ARCHITECTURE, experts=8, top_k=2)
    blocks = (PLAIN[0], replace(PLAIN[1], routed=32_000), *PLAIN[2:])
    assert active_parameters(blocks, moe) == P - 6_400 - 24_000
    assert operations(PLAIN, moe, JOB) - operations(blocks, moe, JOB) == 6 * 32 * 24_000


def test_passes_of_fake_quant():
    assert fake_quant_bytes(PLAIN, JOB) == 0
    assert fake_quant_bytes(QUANTISED, JOB) == 8 * (5 + 9) * 76_000
    assert fake_quant_bytes(QUANTISED, replace(JOB, checkpointing=True)) == 8 * (10 + 9) * 76_000
    assert fake_quant_bytes(QUANTISED, replace(JOB, cached=True, accumulate=4)) == 8 * (5 / 4 + 9) * 76_000


@pytest.mark.parametrize(
    ("stage", "accumulate", "times"),
    [
        ("ddp", 1, 2),
        ("ddp", 4, 2),
        ("zero1", 4, 2),
        ("zero2", 1, 2),
        ("zero2", 4, 5),
        ("zero3", 1, 3),
        ("zero3", 4, 12),
    ],
)
def test_traffic_by_stage(stage, accumulate, times):
    assert traffic(PLAIN, replace(JOB, accumulate=accumulate), stage) == times * 2 * P
    assert traffic(PLAIN, replace(JOB, gpus=1), stage) == 0


def test_gradient_checkpointing_and_a_teacher_gather_once_more_each():
    assert traffic(PLAIN, replace(JOB, checkpointing=True, teacher=True), "zero3") == 5 * 2 * P


def test_links_of_a_collective():
    assert collective_seconds(8e9, JOB, HARDWARE) == pytest.approx(7)  # one node: 8e9 · 7/8 over 1e9
    four = replace(JOB, nodes=4)
    assert collective_seconds(8e9, four, HARDWARE) == pytest.approx(max(8 * 31 / 32, 8e9 * 3 / 4 / 8e8))
    assert collective_seconds(8e9, four, replace(HARDWARE, efficiency=0.5)) == pytest.approx(2 * 8 * 31 / 32)


def test_the_sum_and_the_maximum():
    for stage in STAGES:
        found = step_time(QUANTISED, ARCHITECTURE, JOB, HARDWARE, stage)
        assert found.tokens == 8 * 32
        assert found.overlapped == max(found.computing, found.communication)
        assert found.serial == pytest.approx(found.matrices + found.fake_quant + found.host + found.communication)
        assert (found.host > 0) is (stage == "zero3_offload")
    assert found.matrices == pytest.approx(operations(QUANTISED, ARCHITECTURE, JOB) / 0.5e12)
    mixed, full = (
        step_time(QUANTISED, ARCHITECTURE, replace(JOB, precision=precision), HARDWARE, "ddp").matrices
        for precision in ("bf16-mixed", "32-true")
    )
    assert mixed == found.matrices and full == pytest.approx(10 * mixed)


def test_a_chunk_is_computed_forward_once_more():
    """By its own checkpoint: a second time alone, a third time where the layer is checkpointed too."""
    whole = (Block("layer 0", 60_000, routed=48_000, quantised=50_000, routed_quantised=48_000),)
    parts = (replace(whole[0], chunks=4),)
    for changes, forwards in (({"checkpointing": True}, 3), ({}, 2), ({"recompute": True}, 2), ({"cached": True}, 1)):
        job = replace(JOB, **{"checkpointing": False, **changes})
        others = 2 if {"checkpointing", "recompute"} & changes.keys() else 1
        expected = PASS_BYTES * FORWARD_PASSES * (forwards * 48_000 + others * 2_000)
        assert fake_quant_bytes(parts, job) == expected, changes
        assert traffic(parts, job, "zero3") - traffic(whole, job, "zero3") == job.parameter_bytes * 48_000


def test_hardware_refuses_what_cannot_be():
    with pytest.raises(ValueError, match=r"mfu 1\.5 must lie in"):
        replace(HARDWARE, mfu=1.5)
    with pytest.raises(ValueError, match="link 0 must be positive"):
        replace(HARDWARE, link=0)
    with pytest.raises(ValueError, match="must be below memory"):
        replace(HARDWARE, reserve=1e12)
