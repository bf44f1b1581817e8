"""Progressive lowering: order, even spacing, everything at its target for the last part, and after a resume."""

import json

import pytest

from qdeepseek.precision import ProgressiveRule, ProgressiveScheduler, Statistic

COST = [4.0, 1.0, 2.0, 0.5]
GRADS = [Statistic(0.0, 1.0), Statistic(0.0, 1.0), Statistic(1.0, 2.0), Statistic(0.0, 100.0)]


def lowered(rule, tops, starts, steps, split=None):
    scheduler, changes, asked = ProgressiveScheduler(rule, tops, starts, steps), [], []
    for step in range(1, steps):
        if step == split:
            state = json.loads(json.dumps(scheduler.state_dict()))
            scheduler = ProgressiveScheduler(rule, tops, starts, steps)
            scheduler.load_state_dict(state)
        changes += scheduler.observe(step, GRADS, lambda: asked.append(1) or COST)
    assert len(asked) == 1
    return scheduler, changes


@pytest.mark.parametrize("split", [None, 5, 10, 11, 40])
def test_least_sensitive_first_evenly_and_in_two_passes(split):
    rule = ProgressiveRule("bf16", warmup=10, target_share=0.2)
    scheduler, changes = lowered(rule, (2, 2, 2, 2), (2, 2, 2, 2), 100, split)
    order = [1, 0, 2, 3]  # sensitivities 4, 1, 6, 50 from cost · mean g²
    assert [c.group for c in changes] == order * 2
    assert [(c.before, c.after) for c in changes] == [(2, 1)] * 4 + [(1, 0)] * 4
    assert [c.step for c in changes] == [10 + (k + 1) * 70 // 8 - 1 for k in range(8)]
    assert {c.reason for c in changes} == {"schedule"} and scheduler.rungs == [0] * 4
    ratio = [scheduler.ratios[i] / scheduler.ratios[1] for i in order]
    assert ratio == pytest.approx([1, 4, 6, 50])


def test_from_int8_and_groups_whose_target_is_int8():
    _, changes = lowered(ProgressiveRule("int8", warmup=5), (2, 1, 2, 1), (1, 0, 1, 0), 50)
    assert [(c.group, c.before, c.after) for c in changes] == [(0, 1, 0), (2, 1, 0)]
    assert changes[-1].step == 39
    scheduler, changes = lowered(ProgressiveRule("bf16", warmup=5), (2, 1, 2, 1), (2, 1, 2, 1), 50)
    assert len(changes) == 6 and scheduler.rungs == [0] * 4


def test_a_request_raises_until_the_end():
    scheduler = ProgressiveScheduler(
        ProgressiveRule("int8", warmup=2, target_share=0.5), (2, 2, 2, 2), (1, 1, 1, 1), 20
    )
    changes = []
    for step in range(1, 20):
        changes += scheduler.observe(step, GRADS, lambda: COST)
        if step == 8:
            (up,) = scheduler.request(8, 1, 7.0)
            assert (up.before, up.after, up.reason) == (0, 1, "request")
    assert (changes[-1].step, changes[-1].group, changes[-1].reason) == (10, 1, "end")
    assert scheduler.rungs == [0] * 4 and scheduler.request(12, 1, 7.0) == []


def test_no_room_is_refused():
    with pytest.raises(ValueError, match=r"no step between warmup 20 and the last 20% of 20 steps"):
        ProgressiveScheduler(ProgressiveRule(), [2], [2], 20)
    with pytest.raises(ValueError, match="start 'int4' is unknown"):
        ProgressiveRule("int4")
