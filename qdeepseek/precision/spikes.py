"""Raises the precision of a group whose gradient leaves its own history, and lowers it again when that has calmed.

For group i with gradient mean m and variance v of a step, and the history M, V of the steps before:

    r = (v + (m − M)²) / V                         the step's second moment about the history, in units of it
    a = max(1 − history, 1 / n)                    plain mean of the first steps, then an EMA
    M += a (m − M),  V += a (min(v + (m − M)², raise_at · V) − V)   clipped, so that a spike does not become history

    r > raise_at, or non-finite                 → one rung up, largest r first (of several non-finite ones the
                                                  deepest, since a backward carries them towards the input), while
                                                  at most `budget` of the groups are raised; held for `lock` steps
    r < lower_at for `calm` steps, lock expired → one rung down; between the thresholds nothing moves (hysteresis)
    within `settle` steps of a change           → no further one up: statistics come a step late, and the spike that
                                                  caused the change may be seen twice
    first `warmup` steps                        → history only
    last `target_share` of the run              → finalize target: every group at its target; keep: the map stands

`request` (a guard that found a non-finite value) raises a group whatever warm-up and budget say. Python floats and
+ − · / only: the same statistics give the same decisions on every rank and machine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdeepseek.precision.change import Change
from qdeepseek.precision.statistic import Statistic

TINY = 1e-300


@dataclass(frozen=True)
class SpikeRule:
    """Constants of the module's docstring. Steps are optimizer steps, shares are of groups and of the run."""

    raise_at: float = 6.0
    lower_at: float = 2.0
    history: float = 0.95
    warmup: int = 20
    lock: int = 40
    calm: int = 10
    settle: int = 2
    budget: float = 0.25
    target_share: float = 0.2
    finalize: str = "target"

    def __post_init__(self) -> None:
        if not 0 < self.lower_at < self.raise_at:
            raise ValueError(
                f"lower_at {self.lower_at} must be positive and below raise_at {self.raise_at}; equal thresholds "
                "would switch a group at every step"
            )
        if not 0 <= self.history < 1 or not 0 < self.budget <= 1 or not 0 <= self.target_share <= 1:
            raise ValueError(
                f"history {self.history} must lie in [0, 1), budget {self.budget} in (0, 1], target_share "
                f"{self.target_share} in [0, 1]"
            )
        if min(self.warmup, self.lock, self.calm, self.settle) < 1:
            raise ValueError(
                f"warmup {self.warmup}, lock {self.lock}, calm {self.calm} and settle {self.settle} must be at least 1"
            )
        if self.finalize not in ("target", "keep"):
            raise ValueError(f"finalize {self.finalize!r} is unknown; use target or keep")
        if self.finalize == "target" and not self.target_share:
            raise ValueError(
                "target_share 0 with finalize target would serve a precision that was not trained last; use a share "
                "above 0, say 0.2, or finalize keep"
            )


class SpikeScheduler:
    """The rule at work on groups with ladders of `tops[i] + 1` rungs, in a run of `steps` optimizer steps."""

    def __init__(self, rule: SpikeRule, tops: Sequence[int], steps: int):
        self.rule, self.tops = rule, tuple(tops)
        # a decision holds from the next step on: what lowers everything for the last part is made one step before it
        self.end = steps - math.ceil(rule.target_share * steps) - (rule.finalize == "target")
        self.most = max(1, int(rule.budget * len(tops)))
        self.rungs = [0] * len(tops)
        self.ratios = [0.0] * len(tops)
        self._mean = [0.0] * len(tops)
        self._var = [0.0] * len(tops)
        self._seen = [0] * len(tops)  # finite steps in the history
        self._observed = 0
        self._calm = [0] * len(tops)
        self._changed: list[int | None] = [None] * len(tops)

    def observe(self, step: int, statistics: Sequence[Statistic], cost: Any = None) -> list[Change]:
        """Decisions at `step` from the statistics of one optimizer step; `cost` belongs to the other scheduler."""
        self._observed += 1
        self.ratios = [self._ratio(i, s) for i, s in enumerate(statistics)]
        if step >= self.end:
            return [] if self.rule.finalize == "keep" else self.close(step)
        changes = self._lower(step)
        if self._observed > self.rule.warmup:
            changes += self._raise(step, [s.finite for s in statistics])
        return changes

    def request(self, step: int, group: int, statistic: float) -> list[Change]:
        """Raise a group now, unless it is at the top, changed within `settle` steps, or the map stands for good."""
        if step >= self.end or self.rungs[group] >= self.tops[group] or not self._settled(step, group):
            return []
        return [self._change(step, group, 1, statistic, "request")]

    def close(self, step: int) -> list[Change]:
        """Every group to its target."""
        above = [i for i, rung in enumerate(self.rungs) if rung > 0]
        return [self._change(step, i, -self.rungs[i], self.ratios[i], "end") for i in above]

    def _ratio(self, i: int, s: Statistic) -> float:
        """r, and the history moved on."""
        if not s.finite:
            return math.inf
        moment = s.var + (s.mean - self._mean[i]) * (s.mean - self._mean[i])
        self._seen[i] += 1
        if self._seen[i] == 1:
            self._mean[i], self._var[i] = s.mean, s.var
            return 1.0
        ratio = moment / max(self._var[i], TINY)
        a = max(1.0 - self.rule.history, 1.0 / self._seen[i])
        clipped = min(moment, self.rule.raise_at * self._var[i]) if self._observed > self.rule.warmup else moment
        self._mean[i] += a * (s.mean - self._mean[i])
        self._var[i] += a * (clipped - self._var[i])
        return ratio

    def _lower(self, step: int) -> list[Change]:
        changes = []
        for i, ratio in enumerate(self.ratios):
            self._calm[i] = self._calm[i] + 1 if ratio < self.rule.lower_at else 0
            changed = self._changed[i]
            free = changed is None or step - changed >= self.rule.lock
            if self.rungs[i] > 0 and free and self._calm[i] >= self.rule.calm:
                changes.append(self._change(step, i, -1, ratio, "calm"))
        return changes

    def _raise(self, step: int, finite: Sequence[bool]) -> list[Change]:
        changes = []
        for i in sorted(range(len(self.tops)), key=lambda i: (-self.ratios[i], -i)):
            if not self.ratios[i] > self.rule.raise_at:
                break
            if self.rungs[i] >= self.tops[i]:
                continue
            full = self.rungs[i] == 0 and sum(rung > 0 for rung in self.rungs) >= self.most
            if full or not self._settled(step, i):
                continue
            changes.append(self._change(step, i, 1, self.ratios[i], "spike" if finite[i] else "non-finite"))
        return changes

    def _settled(self, step: int, i: int) -> bool:
        changed = self._changed[i]
        return changed is None or step - changed > self.rule.settle

    def _change(self, step: int, i: int, by: int, statistic: float, reason: str) -> Change:
        before, self.rungs[i] = self.rungs[i], self.rungs[i] + by
        self._changed[i], self._calm[i] = step, 0
        return Change(step, i, before, self.rungs[i], statistic, reason)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on."""
        return {"tops": list(self.tops), "rungs": list(self.rungs), "ratios": list(self.ratios),
                "mean": list(self._mean), "var": list(self._var), "seen": list(self._seen),
                "observed": self._observed, "calm": list(self._calm), "changed": list(self._changed)}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of other groups."""
        if tuple(state["tops"]) != self.tops:
            raise ValueError(
                f"precision scheduler: the checkpoint has {len(state['tops'])} groups and ladders {state['tops']}, "
                f"this run {len(self.tops)} and {list(self.tops)}; resume with the recipe and model of the checkpoint"
            )
        self.rungs, self.ratios = list(state["rungs"]), list(state["ratios"])
        self._mean, self._var, self._seen = list(state["mean"]), list(state["var"]), list(state["seen"])
        self._calm, self._changed = list(state["calm"]), list(state["changed"])
        self._observed = int(state["observed"])
