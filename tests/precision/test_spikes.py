"""SpikeScheduler against a naive scheduler that keeps every list it has ever seen, and its rules one by one."""

import json
import math
import random

import pytest

from qdeepseek.precision import SpikeRule, SpikeScheduler, Statistic, moments

NAN = Statistic(math.nan, math.nan)


class Naive:
    """The same rules told from whole histories: nothing is carried from step to step but lists of what happened."""

    def __init__(self, rule, tops, steps):
        self.rule, self.tops, self.steps = rule, tops, steps
        self.seen = [[] for _ in tops]  # every statistic of a group
        self.changes = []  # (step, group, before, after, reason)

    def rung(self, i):
        return next((c[3] for c in reversed(self.changes) if c[1] == i), 0)

    def since(self, i, step):
        return next((step - c[0] for c in reversed(self.changes) if c[1] == i), math.inf)

    def ratios(self, i):
        """The ratios of all steps of a group, from its whole history anew."""
        mean = var = None
        found, n = [], 0
        for k, s in enumerate(self.seen[i]):
            if not (math.isfinite(s.mean) and math.isfinite(s.var)):
                found.append(math.inf)
                continue
            n += 1
            if mean is None:
                mean, var = s.mean, s.var
                found.append(1.0)
                continue
            moment = s.var + (s.mean - mean) * (s.mean - mean)
            found.append(moment / max(var, 1e-300))
            a = max(1.0 - self.rule.history, 1.0 / n)
            limit = self.rule.raise_at * var if k + 1 > self.rule.warmup else math.inf
            mean += a * (s.mean - mean)
            var += a * (min(moment, limit) - var)
        return found

    def calm(self, i, step):
        """Calm steps in a row up to now, none of them before the group's last change."""
        ratios, count = self.ratios(i), 0
        while count < min(len(ratios), self.since(i, step)) and ratios[-1 - count] < self.rule.lower_at:
            count += 1
        return count

    def observe(self, step, statistics):
        for history, s in zip(self.seen, statistics, strict=True):
            history.append(s)
        before = len(self.changes)
        raised = [i for i in range(len(self.tops)) if self.rung(i)]
        early = self.rule.finalize == "target"  # what is decided now holds from the next step on
        if step + early >= self.steps - math.ceil(self.rule.target_share * self.steps):
            if self.rule.finalize == "target":
                self.changes += [(step, i, self.rung(i), 0, "end") for i in raised]
            return self.changes[before:]
        for i in raised:
            if self.since(i, step) >= self.rule.lock and self.calm(i, step) >= self.rule.calm:
                self.changes.append((step, i, self.rung(i), self.rung(i) - 1, "calm"))
        if len(self.seen[0]) <= self.rule.warmup:
            return self.changes[before:]
        now = [(self.ratios(i)[-1], i) for i in range(len(self.tops))]
        for ratio, i in sorted(now, reverse=True):
            up = sum(self.rung(j) > 0 for j in range(len(self.tops)))
            allowed = self.rung(i) > 0 or up < max(1, int(self.rule.budget * len(self.tops)))
            allowed = allowed and self.rung(i) < self.tops[i] and self.since(i, step) > self.rule.settle
            if ratio > self.rule.raise_at and allowed:
                reason = "spike" if math.isfinite(ratio) else "non-finite"
                self.changes.append((step, i, self.rung(i), self.rung(i) + 1, reason))
        return self.changes[before:]


def stream(seed, groups, steps):
    """Gradient statistics with drift, bursts of single groups and of all, and non-finite values."""
    rng = random.Random(seed)
    base = [10 ** rng.uniform(-8, -2) for _ in range(groups)]
    burst = [1.0] * groups
    for _ in range(steps):
        everywhere = rng.choice([1.0] * 30 + [40.0])
        rows = []
        for i in range(groups):
            burst[i] = max(1.0, burst[i] * 0.6) if rng.random() > 0.03 else 10 ** rng.uniform(0.5, 3)
            var = base[i] * rng.uniform(0.6, 1.5) * burst[i] * everywhere
            bad = rng.random() < 0.004
            rows.append(NAN if bad else Statistic(rng.gauss(0, 1) * math.sqrt(base[i]) * 0.3, var))
        yield rows


@pytest.mark.parametrize("finalize", ["target", "keep"])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_naive_scheduler_on_random_streams(seed, finalize):
    rng = random.Random(seed)
    rule = SpikeRule(
        raise_at=rng.uniform(3, 8), lower_at=rng.uniform(1, 2.5), history=rng.choice([0.5, 0.9, 0.98]),
        warmup=rng.randint(1, 20), lock=rng.randint(1, 20), calm=rng.randint(1, 6), settle=rng.randint(1, 4),
        budget=rng.choice([0.1, 0.3, 1.0]), target_share=rng.choice([0.1, 0.3]), finalize=finalize,
    )  # fmt: skip
    tops, steps = [rng.choice([1, 2, 2]) for _ in range(9)], 150
    fast, naive = SpikeScheduler(rule, tops, steps), Naive(rule, tops, steps)
    everything, most = [], 0
    for step, statistics in enumerate(stream(seed, len(tops), steps)):
        if step == 70:  # a new process takes over from what a checkpoint holds
            state, fast = json.loads(json.dumps(fast.state_dict())), SpikeScheduler(rule, tops, steps)
            fast.load_state_dict(state)
        changes = fast.observe(step, statistics)
        assert [(c.step, c.group, c.before, c.after, c.reason) for c in changes] == naive.observe(step, statistics)
        everything += changes
        most = max(most, sum(r > 0 for r in fast.rungs))
    assert {c.reason for c in everything} >= {"spike", "calm"} and 0 < most <= fast.most
    assert finalize == "keep" or fast.rungs == [0] * len(tops)


CALM = Statistic(0.0, 1.0)


def run(rule, rows, tops=(2, 2, 2, 2), steps=1000):
    scheduler = SpikeScheduler(rule, tops, steps)
    return scheduler, [c for step, row in enumerate(rows) for c in scheduler.observe(step, row)]


def rows(steps, **spikes):
    """Four groups, calm but for `gI=(step, ratio)`."""
    table = [[CALM] * 4 for _ in range(steps)]
    for name, where in spikes.items():
        for step, value in where:
            table[step][int(name[1:])] = value if isinstance(value, Statistic) else Statistic(0.0, value)
    return table


def told(changes):
    return [(c.step, c.group, c.before, c.after, c.reason) for c in changes]


def test_a_spike_raises_one_rung_for_the_lock_then_steps_down():
    rule = SpikeRule(raise_at=4, lower_at=2, warmup=5, lock=10, calm=3, budget=1.0)
    _, changes = run(rule, rows(40, g1=[(8, 50.0)]))
    assert told(changes) == [(8, 1, 0, 1, "spike"), (18, 1, 1, 0, "calm")]
    assert changes[0].statistic == 50.0


def test_a_second_spike_goes_on_to_the_top_and_steps_down_twice():
    rule = SpikeRule(raise_at=4, lower_at=2, warmup=5, lock=10, calm=3, settle=2, budget=1.0, history=0.99)
    _, changes = run(rule, rows(60, g0=[(8, 50.0), (9, 50.0), (11, 80.0), (14, 900.0)]))
    assert told(changes) == [(8, 0, 0, 1, "spike"), (11, 0, 1, 2, "spike"), (21, 0, 2, 1, "calm"),
                             (31, 0, 1, 0, "calm")]  # fmt: skip


def test_between_the_thresholds_nothing_moves():
    rule = SpikeRule(raise_at=4, lower_at=2, warmup=5, lock=2, calm=2, budget=1.0, history=0.999)
    restless = [(step, 3.0) for step in range(61, 80)]
    _, changes = run(rule, rows(80, g2=[(60, 50.0), *restless]))
    assert told(changes) == [(60, 2, 0, 1, "spike")]
    _, changes = run(rule, rows(80, g2=[(60, 50.0)]))
    assert told(changes)[1:] == [(62, 2, 1, 0, "calm")]


def test_warm_up_holds_back_spikes_and_non_finite_values_and_requests_pass():
    rule = SpikeRule(raise_at=4, warmup=10, budget=0.25)
    scheduler, changes = run(rule, rows(9, g0=[(5, 1e6)], g1=[(6, NAN)]))
    assert changes == []
    assert told(scheduler.request(9, 3, math.inf)) == [(9, 3, 0, 1, "request")]
    assert scheduler.request(10, 3, math.inf) == [], "within `settle` of the change"
    assert told(scheduler.request(12, 3, math.inf)) == [(12, 3, 1, 2, "request")]
    assert scheduler.request(20, 3, math.inf) == [], "the top"
    assert scheduler.request(990, 0, math.inf) == [], "the last part of the run"


def test_the_budget_takes_the_largest_and_the_deepest_non_finite():
    rule = SpikeRule(raise_at=4, warmup=5, budget=0.5, lock=100)
    _, changes = run(rule, rows(12, g0=[(8, 10.0)], g1=[(8, 30.0)], g3=[(8, 20.0)]))
    assert told(changes) == [(8, 1, 0, 1, "spike"), (8, 3, 0, 1, "spike")]
    _, changes = run(rule, rows(12, g0=[(8, NAN)], g1=[(8, NAN)], g2=[(8, NAN)], g3=[(8, 1e9)]))
    assert told(changes) == [(8, 2, 0, 1, "non-finite"), (8, 1, 0, 1, "non-finite")]


def test_a_shift_of_the_mean_is_a_spike_and_history_adapts_to_a_new_level():
    rule = SpikeRule(raise_at=4, warmup=5, lock=1, calm=2, history=0.9, budget=1.0)
    scheduler, changes = run(rule, rows(8, g0=[(7, Statistic(5.0, 1.0))]))
    assert told(changes) == [(7, 0, 0, 1, "spike")]
    _, changes = run(rule, rows(120, g0=[(step, 100.0) for step in range(8, 120)]))
    assert changes[-1].reason == "calm" and changes[-1].after == 0
    assert scheduler.ratios[0] == 26.0


def test_zero_gradients_are_calm():
    rule = SpikeRule(warmup=2)
    _, changes = run(rule, [[Statistic(0.0, 0.0)] * 4] * 20)
    assert changes == []


def test_moments():
    values = [1.5, -2.0, 4.0, 0.25]
    (found,) = moments([sum(values)], [sum(v * v for v in values)], [len(values)])
    mean = sum(values) / 4
    assert found.mean == mean and found.var == pytest.approx(sum((v - mean) ** 2 for v in values) / 4, rel=1e-12)
    assert not moments([math.nan], [1.0], [3])[0].finite
    assert not moments([1.0], [math.inf], [3])[0].finite
    assert moments([3.0], [3.0], [3])[0] == (1.0, 0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lower_at": 6.0}, "lower_at 6.0 must be positive and below raise_at 6.0"),
        ({"budget": 0}, "budget 0 in"),
        ({"warmup": 0}, "warmup 0"),
        ({"finalize": "int4"}, "finalize 'int4' is unknown; use target or keep"),
        ({"target_share": 0}, "target_share 0 with finalize target"),
    ],
)
def test_wrong_values(values, message):
    with pytest.raises(ValueError, match=message):
        SpikeRule(**values)


def test_state_of_other_groups_is_refused():
    state = SpikeScheduler(SpikeRule(), [2, 2], 10).state_dict()
    with pytest.raises(ValueError, match=r"2 groups and ladders \[2, 2\], this run 3"):
        SpikeScheduler(SpikeRule(), [2, 2, 1], 10).load_state_dict(state)
