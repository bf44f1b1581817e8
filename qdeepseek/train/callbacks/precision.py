"""Precision of fusion groups during QAT: gradient statistics in, levels of the quantisers out (precision/*.py).

    after the backward of step t, before clipping:  Σg and Σg² of every group, on the device
    all_reduce (one, 2 × groups numbers in fp64), copy to the host without waiting
    same point of step t + 1:                       read them, decide, set levels; the forward of t + 2 is the first
                                                    that uses them

Read one step late, the copy has long arrived when it is needed: the cost of a step is two reductions over each weight
gradient, one small all_reduce and one copy of 16 bytes a group, and no wait. All ranks see the same sums, whether
they hold whole gradients (DDP) or different ones, so they decide the same. Under ZeRO, which leaves no gradient behind,
the sums are those of the micro-batches' own gradients (train/gradients.py). The decisions are lines of events.jsonl and
of W&B's history.

`raise_group(module_name, step, statistic)` is for a guard that knows which module went wrong: on every rank, between
a backward and the next forward, it raises the group of that module (or of the quantised module that holds it) by one
level at once, whatever warm-up and budget say; True if it did.

Scheduler state, statistics not yet read and the number of events are in the checkpoint; levels are also in the state
dict of the quantisers. With `finalize: keep` the map that stands at the end becomes a recipe (surgery/fusion.py), and
coverage, manifest and export are those of that recipe.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qdeepseek.precision import (
    Change,
    ProgressiveRule,
    ProgressiveScheduler,
    SpikeRule,
    SpikeScheduler,
    moments,
)
from qdeepseek.routing.ranks import sum_over_ranks
from qdeepseek.surgery.fusion import FusionGroup, fusion_groups, keep_levels
from qdeepseek.train.config import ConfigError, build
from qdeepseek.train.events import EventLog
from qdeepseek.train.gradients import LocalMoments
from qdeepseek.train.zero import ZeroConfig, elements, engine_of, gathered, refresh, steps_now

Pending = tuple[Tensor, Any]  # (2, groups) on the host, and the event after which it is there


def on_spikes(log_every: int = 50, **rule: Any) -> "Precision":
    """method/precision=scheduler: keys of SpikeRule."""
    return Precision(build(SpikeRule, rule, "method.precision"), log_every)


def progressive(log_every: int = 50, **rule: Any) -> "Precision":
    """method/precision=progressive: keys of ProgressiveRule."""
    return Precision(build(ProgressiveRule, rule, "method.precision"), log_every)


class Precision(Callback):
    """Moves fusion groups between target, INT8 and bf16 by `rule`."""

    def __init__(self, rule: SpikeRule | ProgressiveRule, log_every: int = 50):
        self.rule, self.log_every = rule, log_every
        self.groups: list[FusionGroup] = []
        self.scheduler: SpikeScheduler | ProgressiveScheduler
        self.events: EventLog
        self._counts: list[int] = []
        self._owner = torch.empty(0)
        self._pending: Pending | None = None
        self._local: LocalMoments | None = None
        self._trainer: L.Trainer | None = None
        self._wandb: Any = None

    # --- before and after the fit ---

    def attach(self, run: Any, student: Any) -> None:
        """Groups of the prepared student, and their levels at the start."""
        self.groups = fusion_groups(student)
        tops = [len(group.ladder) - 1 for group in self.groups]
        if isinstance(self.rule, SpikeRule):
            self.scheduler = SpikeScheduler(self.rule, tops, run.qat_steps)
        else:
            start: Any = self.rule.start
            starts = [g.ladder.index(start) if start in g.ladder else 0 for g in self.groups]
            self.scheduler = ProgressiveScheduler(self.rule, tops, starts, run.qat_steps)
        self.events, self._wandb = EventLog(run.folder, "precision"), run.wandb
        self._delay = run.method.delay_steps
        self._set_levels()

    def finish(self, run: Any, student: Any) -> None:
        """Make the map that stands the recipe of the run (`finalize: keep`), or lower what is still raised."""
        if isinstance(self.rule, SpikeRule) and self.rule.finalize == "keep":
            levels = {name: g.ladder[r] for g, r in self._standing() for name in g.modules}
            run.recipe = keep_levels(student, run.recipe, levels)
        else:
            self._apply(self.scheduler.close(run.qat_steps))

    def check(self, run: Any, model: Any) -> None:
        """Refuses, before anything is trained, what the export could not say and two delays at once."""
        if isinstance(self.rule, ProgressiveRule):
            if run.method.delay_steps:
                raise ConfigError(
                    f"method.precision: progressive lowering starts above the target by itself; set method.delay_steps "
                    f"{run.method.delay_steps} to 0"
                )
            return
        if self.rule.finalize == "keep" and isinstance(run.strategy, ZeroConfig) and run.strategy.stage == 3:
            raise ConfigError(
                f"method.precision.finalize keep: strategy {run.strategy.name} exports from its checkpoint, by the "
                "recipe that the run began with; use zero2 or ddp, or finalize target"
            )
        served = run.export.dtype or run.model.dtype
        schemes = [(rule.name, rule.scheme) for rule in run.recipe.rules if rule.scheme is not None]
        loose = [name for name, scheme in schemes if scheme.weight.serve_dtype is None]
        if self.rule.finalize == "keep" and loose and served != run.model.dtype:
            raise ConfigError(
                f"method.precision.finalize keep: the scheme of rule {loose[0]} has serve_dtype null, so a group "
                f"that ends in bf16 would be trained in {run.model.dtype} and exported in {served}; set serve_dtype to "
                "that, export.dtype to the dtype of training, or finalize target"
            )

    # --- during the fit ---

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.events.rewind(self.events.count)
        weights = [(i, t.weight) for i, g in enumerate(self.groups) for t in g.tensors if t.weight.requires_grad]
        if {i for i, _ in weights} != set(range(len(self.groups))):
            missing = next(g.name for i, g in enumerate(self.groups) if i not in {i for i, _ in weights})
            raise ConfigError(
                f"method.precision watches the gradients of quantised weights, and {missing} is not trained (LoRA?); "
                "train it, keep it in bf16 with a rule in conf/quant, or set method/precision=off"
            )
        self._weights = [w for _, w in weights]
        self._owner = torch.tensor([i for i, _ in weights], device=pl_module.device)
        self._counts = [sum(elements(t.weight) for t in g.tensors) * trainer.world_size for g in self.groups]
        self._trainer = trainer
        if engine_of(trainer) is not None:
            self._local = LocalMoments(self._weights, pl_module.device, means=True)
        self._set_levels()

    def on_before_backward(self, *args: Any) -> None:
        if self._local is not None:
            self._local.counting = True

    def on_after_backward(self, *args: Any) -> None:
        if self._local is not None:
            self._local.counting = False

    def on_train_end(self, *args: Any) -> None:
        self._trainer = None
        if self._local is not None:
            self._local.remove()
            self._local = None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        step = trainer.global_step
        if not steps_now(trainer):
            return
        if step < self._delay:
            if self._local is not None:
                self._local.take()
            return
        if self._pending is not None:
            sums, squares = self._read()
            changes = self.scheduler.observe(step, moments(sums, squares, self._counts), self._rounding)
            self._apply(changes)
        self._pending = self._send(self._sums())
        self._set_levels()  # also after somebody loaded an older state into the model
        if step % self.log_every == 0:
            pl_module.log("precision/raised_groups", float(sum(rung > 0 for rung in self.scheduler.rungs)))
            pl_module.log("precision/largest_statistic", float(max(self.scheduler.ratios)))

    def _sums(self) -> Tensor:
        """(2, groups) in fp64: Σg and Σg² of this rank's gradients."""
        if self._local is not None:
            own = self._local.take()
            return own.new_zeros(2, len(self.groups)).index_add_(1, self._owner, own)
        grads = [w.grad for w in self._weights]
        if any(g is None for g in grads):
            raise ConfigError(
                "method.precision: a quantised weight has no gradient when the optimizer steps (a strategy that "
                "shards or releases gradients?); use strategy auto or ddp, or method/precision=off"
            )
        kept = [g.detach() for g in grads if g is not None]
        total = torch.stack([g.sum(dtype=torch.float32) for g in kept]).double()
        norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in kept]).double()
        sums = torch.zeros(2, len(self.groups), dtype=torch.float64, device=total.device)
        return sums.index_add_(1, self._owner, torch.stack([total, norm.square_()]))

    def _send(self, sums: Tensor) -> Pending:
        reduced = sum_over_ranks(sums)  # Lightning's own puts a barrier before it, for which the host waits
        if reduced.device.type != "cuda":
            return reduced.cpu(), None
        host = torch.empty(reduced.shape, dtype=reduced.dtype, pin_memory=True)
        host.copy_(reduced, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return host, arrived

    def _read(self) -> tuple[list[float], list[float]]:
        assert self._pending is not None
        host, arrived = self._pending
        if arrived is not None:
            arrived.synchronize()
        sums, squares = host.tolist()
        return sums, squares

    @torch.no_grad()
    def _rounding(self) -> list[float]:
        """Σ (ŵ − w)² of every group at its target, one tensor whole at a time. Once a run, and the only wait for the
        device."""
        found = []
        with self.at_target():
            for group in self.groups:
                squares = []
                for t in group.tensors:
                    with gathered([t.weight, *t.quantizer.parameters()]):
                        squares.append((t.quantizer(t.weight).float() - t.weight.float()).square().sum())
                found.append(torch.stack(squares).double().sum())
        return torch.stack(found).tolist()

    # --- decisions ---

    @contextmanager
    def at_target(self) -> Iterator[None]:
        """Every group at its target for a forward without gradient: what would be served now."""
        for group in self.groups:
            group.set_level("target")
        try:
            yield
        finally:
            self._set_levels()

    def raise_group(self, module_name: str, step: int, statistic: float) -> bool:
        """Raise the group of a module that went wrong; see the top of the file. False where nothing was raised."""
        index = self._group_of(module_name)
        if index is None:
            return False
        changes = self.scheduler.request(step, index, statistic)
        self._apply(changes)
        return bool(changes)

    def _group_of(self, name: str) -> int | None:
        for index, group in enumerate(self.groups):
            for module in group.modules:
                if f".{module}." in f".{name}.":
                    return index
        return None

    def _apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            group = self.groups[change.group]
            before, after = (group.ladder[rung] for rung in (change.before, change.after))
            if isinstance(self.rule, ProgressiveRule) and after == "target":
                self._initialize(group)
            group.set_level(after)
            event = self.events.append(
                step=change.step, group=group.name, statistic=change.statistic, reason=change.reason,
                **{"from": group.label(before), "to": group.label(after)},
            )  # fmt: skip
            if self._wandb is not None:
                self._wandb.log_metrics({f"precision/{k}": v for k, v in event.items() if k != "kind"}, change.step)

    def _initialize(self, group: FusionGroup) -> None:
        """Scales of the weights as they are now, on the way down to the target."""
        for tensor in group.tensors:
            own = list(tensor.quantizer.parameters())
            with gathered([tensor.weight]), gathered(own, write=True):
                tensor.quantizer.initialize(tensor.weight)
        if self._trainer is not None:
            refresh(self._trainer)

    def _standing(self) -> list[tuple[FusionGroup, int]]:
        return list(zip(self.groups, self.scheduler.rungs, strict=True))

    def _set_levels(self) -> None:
        for group, rung in self._standing():
            group.set_level(group.ladder[rung])

    # --- the checkpoint ---

    def state_dict(self) -> dict[str, Any]:
        pending = None if self._pending is None else self._read()
        return {"scheduler": self.scheduler.state_dict(), "pending": pending, "events": self.events.count,
                "groups": [group.name for group in self.groups]}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        names = [group.name for group in self.groups]
        if state_dict["groups"] != names:
            changed = next((n for n in state_dict["groups"] if n not in names), "their order")
            raise ConfigError(
                f"method.precision: the checkpoint has other groups than this run ({changed}); resume with the recipe "
                "of the checkpoint"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        pending = state_dict["pending"]
        self._pending = None if pending is None else (torch.tensor(pending, dtype=torch.float64), None)
        self.events.rewind(state_dict["events"])
        self._set_levels()
