"""Progressive lowering: every group starts high and reaches its target one rung at a time, least sensitive first.

    sensitivity_i = mean g² · Σ (ŵ − w)²      g gradient, ŵ the weight at its target, over the elements of group i

which is twice the rise of the loss that the target's rounding would cost, with the squared gradient as the diagonal
of the Hessian (empirical Fisher, arXiv 1911.03852). The gradient part is averaged over the first `warmup` steps, the
rounding part is taken at their end; then the order is fixed, the group whose rounding costs least going first.
With K rungs to go down in all, all groups' first rungs before all second ones,

    drop k of K happens at step  warmup + ((k + 1) · (end − warmup)) // K − 1,    end = (1 − target_share) · steps

so that the last `target_share` of the run is trained at the target. `request` raises a group one rung again until
its next drop, at the latest until `end`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdeepseek.precision.change import Change
from qdeepseek.precision.statistic import Statistic

START = ("int8", "bf16")


@dataclass(frozen=True)
class ProgressiveRule:
    """start: rung the run begins at, int8 or bf16; warmup in steps; target_share of the run."""

    start: str = "bf16"
    warmup: int = 20
    target_share: float = 0.2

    def __post_init__(self) -> None:
        if self.start not in START:
            raise ValueError(f"start {self.start!r} is unknown; use int8 or bf16")
        if self.warmup < 1 or not 0 < self.target_share < 1:
            raise ValueError(
                f"warmup {self.warmup} must be at least 1 and target_share {self.target_share} lie in (0, 1)"
            )


class ProgressiveScheduler:
    """The rule at work on groups that start at rungs `starts` of ladders with `tops[i] + 1`, in a run of `steps`."""

    def __init__(self, rule: ProgressiveRule, tops: Sequence[int], starts: Sequence[int], steps: int):
        self.rule, self.tops = rule, tuple(tops)
        self.end = steps - math.ceil(rule.target_share * steps)
        if self.end <= rule.warmup:
            raise ValueError(
                f"progressive lowering has no step between warmup {rule.warmup} and the last {rule.target_share:.0%} "
                f"of {steps} steps; lower warmup or target_share, or train longer"
            )
        self.rungs = list(starts)
        self.ratios = [0.0] * len(tops)
        self._energy = [0.0] * len(tops)  # sum of mean g² over the warm-up
        self._drops: list[tuple[int, int, float]] = []  # (step, group, sensitivity), from the end of the warm-up on
        self._ordered = False

    def observe(
        self, step: int, statistics: Sequence[Statistic], cost: Callable[[], Sequence[float]] | None = None
    ) -> list[Change]:
        """Decisions at `step`; `cost()` gives Σ (ŵ − w)² of every group and is called once, when warm-up ends."""
        if not self._ordered:
            for i, s in enumerate(statistics):
                self._energy[i] += s.var + s.mean * s.mean if s.finite else 0.0
            if step + 1 >= self.rule.warmup:
                self._order([0.0] * len(self.tops) if cost is None else cost())
        changes = []
        while self._drops and self._drops[0][0] <= step:
            _, i, sensitivity = self._drops.pop(0)
            if self.rungs[i] > 0:
                changes.append(self._change(step, i, -1, sensitivity, "schedule"))
        return changes + (self.close(step) if step >= self.end else [])

    def request(self, step: int, group: int, statistic: float) -> list[Change]:
        """Raise a group one rung now, unless it is at the top or the run is in its last part."""
        if step >= self.end or self.rungs[group] >= self.tops[group]:
            return []
        return [self._change(step, group, 1, statistic, "request")]

    def close(self, step: int) -> list[Change]:
        """Every group to its target."""
        return [self._change(step, i, -r, self.ratios[i], "end") for i, r in enumerate(self.rungs) if r > 0]

    def _order(self, cost: Sequence[float]) -> None:
        self._ordered = True
        self.ratios = [energy / self.rule.warmup * c for energy, c in zip(self._energy, cost, strict=True)]
        order = sorted(range(len(self.tops)), key=lambda i: (self.ratios[i], i))
        passes = range(max(self.rungs, default=0))
        queue = [i for done in passes for i in order if self.rungs[i] > done]
        span = self.end - self.rule.warmup
        self._drops = [
            (self.rule.warmup + (k + 1) * span // len(queue) - 1, i, self.ratios[i]) for k, i in enumerate(queue)
        ]

    def _change(self, step: int, i: int, by: int, statistic: float, reason: str) -> Change:
        before, self.rungs[i] = self.rungs[i], self.rungs[i] + by
        return Change(step, i, before, self.rungs[i], statistic, reason)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on."""
        return {"tops": list(self.tops), "rungs": list(self.rungs), "ratios": list(self.ratios),
                "energy": list(self._energy), "drops": [list(d) for d in self._drops],
                "ordered": self._ordered}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of other groups."""
        if tuple(state["tops"]) != self.tops:
            raise ValueError(
                f"progressive lowering: the checkpoint has {len(state['tops'])} groups and ladders {state['tops']}, "
                f"this run {len(self.tops)} and {list(self.tops)}; resume with the recipe and model of the checkpoint"
            )
        self.rungs, self.ratios, self._energy = list(state["rungs"]), list(state["ratios"]), list(state["energy"])
        self._drops = [(int(step), int(i), float(s)) for step, i, s in state["drops"]]
        self._ordered = bool(state["ordered"])
