"""A step with a non-finite loss or gradient norm changes nothing, on no rank; its cause is named; it may not go on.

Hot path, all on the device, without a sync:
    loss_bad    any micro-batch's loss is not finite (its gradient may well be)
    norm_bad    the norm of all gradients is not finite (before clipping, after accumulation and all-reduce)
    flags = max over ranks (loss_bad, norm_bad);  skip = max(flags)
`skip` is AdamW's `found_inf` (torch's fused optimizers leave parameters, moments and step counters as they are), or
the GradScaler's under fp16 autocast, and `pl_module.step_skipped` for whatever else a step moves (router bias). The
flags are copied to the host behind the step's kernels and read before the next optimizer step: the weights are then
still those that failed. Clipping with a NaN norm writes NaN into gradients that nobody applies.

After a failed step (rare, and there the host waits) every rank runs the step's batches again with watched modules
(train/replay.py), the first finding of all ranks is taken, and `raise_group(module, step, inf)` of a precision
scheduler among the callbacks is called with it. After `patience` failed steps in a row the last good state is
restored (train/good_state.py; kept with every checkpoint, if all of it is finite and the step before did not fail),
once in a run; the next `patience` in a row stop it.

A skipped step counts: it uses up its batch, its place in the learning-rate schedule and in `trainer.steps`, so that
schedule, delays and data stay functions of the global step on every rank. Only Adam's own step counter does not
move. Restoring goes back in weights and moments, not in data or schedule.

Under ZeRO no gradient is left to take a norm of: the flag is that of the norms of the micro-batches' own gradients
(train/gradients.py), and a sum that overflows only in the reduction is left to DeepSpeed, which skips it on all ranks
too and is asked for it afterwards. The good state is then not a copy but the newest checkpoint, read back by all ranks.

Under fp16 autocast a finite loss with overflowing gradients is the GradScaler's business (it halves the scale) as
long as the scale is above 1: counted as a back-off, neither named nor counted against `patience`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from qdeepseek.layers import whole_name
from qdeepseek.train.checkpoints import last_checkpoint
from qdeepseek.train.config import ConfigError
from qdeepseek.train.fault import nonfinite_tensor
from qdeepseek.train.good_state import GoodState, as_dict, copy_state, restore_, restore_checkpoint_
from qdeepseek.train.gradients import LocalMoments
from qdeepseek.train.replay import replay
from qdeepseek.train.zero import engine_of, steps_now, steps_on_host, torch_optimizer


class NonFiniteError(FloatingPointError):
    """Training stopped: too many steps in a row had a non-finite loss or gradient."""


def step_flags(loss_bad: Tensor, grads: list[Tensor]) -> Tensor:
    """(2,) fp32 on the device: loss non-finite, gradient norm non-finite."""
    norm = torch.nn.utils.get_total_norm(grads)
    return torch.stack([loss_bad, (~torch.isfinite(norm)).to(loss_bad)])


class LateFlags:
    """Two flags on their way to the host: written behind a step's kernels, read when they have long arrived."""

    def __init__(self, device: torch.device):
        cuda = device.type == "cuda"
        self.host = torch.zeros(2, pin_memory=cuda)
        self.arrived = torch.cuda.Event() if cuda else None

    def write(self, flags: Tensor) -> None:
        self.host.copy_(flags, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record()

    def read(self) -> tuple[bool, bool]:
        if self.arrived is not None:
            self.arrived.synchronize()
        loss_bad, norm_bad = self.host.tolist()
        return bool(loss_bad), bool(norm_bad)


class Guard(Callback):
    """Skips failed steps, names their cause, restores the last good state once, and stops.

    Args:
        patience: failed steps in a row after which the last good state is restored, and then the run stopped.
        restore: keep a copy of weights and optimizer on the host (rank 0), renewed with every checkpoint.
        log_every: optimizer steps between two values of `guard/skipped` in the log.
    """

    def __init__(self, patience: int = 3, restore: bool = True, log_every: int = 50):
        if patience < 1 or log_every < 1:
            raise ValueError(
                f"patience {patience} and log_every {log_every} must be at least 1; off is method/guard=off"
            )
        self.patience, self.restore, self.log_every = patience, restore, log_every
        self.skipped = self.backoffs = self.row = 0
        self.restored_at: int | None = None
        self.events: list[dict[str, Any]] = []
        self.good: GoodState | None = None  # rank 0 only
        self.good_step: int | None = None
        self._pending: tuple[int, int] | None = None  # step whose flags are on their way, batches consumed by then
        self._loss_bad = self._flags = None
        self._local: LocalMoments | None = None  # ZeRO only
        self._step = 0

    _loss_bad: Tensor | None
    _flags: LateFlags | None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy, engine, optimizer = trainer.strategy, engine_of(trainer), torch_optimizer(trainer)
        fused = bool(optimizer.defaults.get("fused"))
        plain = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not strategy.handles_gradient_accumulation
        if not (plain or engine is not None) or fused == (_scaler(trainer) is not None):
            raise ConfigError(
                f"method.guard: strategy {type(strategy).__name__} with optimizer "
                f"{type(optimizer).__name__}(fused={fused}); the guard needs one device, DDP or ZeRO, and a fused "
                f"optimizer (under fp16 autocast: one that is not fused); set method/guard=off"
            )
        if engine is not None:
            self._local = LocalMoments((p for p in pl_module.parameters() if p.requires_grad), pl_module.device)
        saved, self._flags = self._flags, LateFlags(pl_module.device)
        if saved is not None:
            self._flags.host.copy_(saved.host)
        self._loss_bad = torch.zeros((), device=pl_module.device)
        self._step = trainer.global_step
        self._keep(trainer, pl_module)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        assert self._loss_bad is not None
        self._loss_bad = torch.maximum(self._loss_bad, (~torch.isfinite(loss.detach())).float())
        if self._local is not None:
            self._local.counting = True

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._local is not None:
            self._local.counting = False

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        assert self._loss_bad is not None and self._flags is not None
        if not steps_now(trainer):
            return
        optimizer = torch_optimizer(trainer)
        restored = self._settle(trainer, pl_module)
        if self._local is None:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            flags = step_flags(self._loss_bad, grads)
        else:
            finite = torch.isfinite(self._local.take()).all()
            flags = torch.stack([self._loss_bad, (~finite).to(self._loss_bad)])
        if trainer.world_size > 1:
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        skip = torch.ones_like(flags[0]) if restored else flags.amax()  # restored: the gradient is of other weights
        scaler = _scaler(trainer)
        if scaler is None:
            # torch's own copy to an optimizer on the host is not waited for, and would be read before it is there
            optimizer.found_inf = skip.cpu() if steps_on_host(trainer) else skip
        else:
            for found in scaler._found_inf_per_device(optimizer).values():
                found.copy_(skip)
        pl_module.step_skipped = skip
        if not restored:
            self._flags.write(flags)
            self._pending = trainer.global_step + 1, trainer.datamodule.consumed  # type: ignore[attr-defined]
        self._loss_bad = torch.zeros_like(self._loss_bad)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step, engine = trainer.global_step, engine_of(trainer)
        if engine is not None and engine.optimizer.overflow and self._flags is not None:
            self._flags.write(torch.maximum(self._flags.host, torch.tensor([0.0, 1.0])))
        if self._step % self.log_every == 0:
            pl_module.log("guard/skipped", float(self.skipped))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._settle(trainer, pl_module)
        if self._local is not None:
            self._local.remove()
            self._local = None

    def _settle(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        """Read the last step's flags and act on them; True when an earlier state was restored."""
        if self._pending is None:
            return False
        assert self._flags is not None
        (step, consumed), self._pending = self._pending, None
        loss_bad, norm_bad = self._flags.read()
        if not loss_bad and not norm_bad:
            self.row = 0
            return False
        scaler = _scaler(trainer)
        if scaler is not None and not loss_bad and scaler.get_scale() > 1:
            self.backoffs += 1
            return False
        self.skipped, self.row = self.skipped + 1, self.row + 1
        quantity = "loss" if loss_bad else "gradient norm"
        event = {"step": step, "quantity": quantity, **replay(trainer, pl_module, consumed)}
        event["raised"] = _raise_group(trainer, event["module"], step)
        event["action"] = self._action()
        self.events.append(event)
        rank_zero_warn(f"guard: {_sentence(event)}; skipped on all ranks")
        if event["action"] == "restore":
            if self._local is None:
                restore_(self.good, pl_module, trainer.optimizers[0], broadcast=trainer.world_size > 1)
            else:
                restore_checkpoint_(trainer, str(self._newest(trainer, pl_module)))
            self.restored_at, self.row, self.good = step, 0, None
            rank_zero_warn(f"guard: state of step {self.good_step} restored after step {step}")
        message = self._last_words(trainer, event) if event["action"] == "stop" else None
        self._report(trainer, message)
        if message:
            raise NonFiniteError(message)
        return event["action"] == "restore"

    def _action(self) -> str:  # the same on all ranks
        if self.row < self.patience:
            return "skip"
        return "restore" if self.restored_at is None and self.good_step is not None else "stop"

    def _last_words(self, trainer: L.Trainer, event: Mapping[str, Any]) -> str:
        before = "there was no good state to go back to"
        if self.restored_at is not None:
            before = f"the state of step {self.good_step} was restored after step {self.restored_at}"
        elif not self.restore:
            before = "method.guard.restore is off"
        return (
            f"method.guard: {self.row} optimizer steps in a row failed (patience {self.patience}), and {before}. Last: "
            f"{_sentence(event)}. Report: {_report_file(trainer)}. Lower the learning rate, keep that module at a "
            f"higher precision with a rule in conf/quant, or train in bf16 or fp32 (trainer.precision); then start a "
            f"new run_dir"
        )

    def _report(self, trainer: L.Trainer, message: str | None) -> None:
        if not trainer.is_global_zero:
            return
        facts = {
            "skipped": self.skipped, "backoffs": self.backoffs, "restored_after_step": self.restored_at,
            "restored_to_step": None if self.restored_at is None else self.good_step,
            "stopped": message, "events": self.events,
        }  # fmt: skip
        file = _report_file(trainer)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(facts, indent=1) + "\n")

    def _newest(self, trainer: L.Trainer, pl_module: L.LightningModule) -> str | None:
        newest = last_checkpoint(Path(trainer.default_root_dir), str(pl_module.stage))
        return trainer.strategy.broadcast(newest)  # a shared file system may show ranks different moments

    def _keep(self, trainer: L.Trainer, pl_module: L.LightningModule, saving: bool = False) -> None:
        """Copy the state if it is good, or under ZeRO that its checkpoint is; waits for the device."""
        if not self.restore or self.restored_at is not None or self.good_step == trainer.global_step:
            return
        if saving and self._local is not None:
            self.good_step = None  # that checkpoint is about to be replaced by this one, good or not
        if self.row or (self._pending is not None and self._flags is not None and any(self._flags.read())):
            return
        fault = nonfinite_tensor(pl_module)
        anywhere = fault is not None
        if self._local is not None:  # each rank has seen its part; a checkpoint that lies there already is good or not
            found = torch.tensor(float(anywhere), device=pl_module.device)
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
            anywhere = bool(found)
        if anywhere:  # as an inf that a learned scale clamps to the largest code
            what = "a rank's part" if fault is None else fault.what
            rank_zero_warn(f"guard: {what} holds inf or NaN after step {trainer.global_step}; no good state")
            return
        if self._local is not None and not saving and self._newest(trainer, pl_module) is None:
            return
        self.good_step = trainer.global_step
        if trainer.is_global_zero and self._local is None:
            self.good = copy_state(pl_module, trainer.optimizers[0], trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._keep(trainer, pl_module, saving=True)
        older = self.good_step != trainer.global_step  # else the checkpoint itself is the good state
        checkpoint["qdeepseek_guard"] = {
            "skipped": self.skipped, "backoffs": self.backoffs, "row": self.row, "restored_at": self.restored_at,
            "events": self.events, "pending": self._pending,
            "flags": self._flags.read() if self._flags is not None and self._pending is not None else None,
            "good_step": self.good_step if older else None, "good": as_dict(self.good) if older else None,
        }  # fmt: skip

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("qdeepseek_guard")
        if state is None:
            return
        for name in ("skipped", "backoffs", "row", "restored_at", "events", "good_step"):
            setattr(self, name, state[name])
        self.good = GoodState(**state["good"]) if state["good"] and trainer.is_global_zero else None
        self._pending = state["pending"]
        if self._pending is not None:
            self._flags = LateFlags(torch.device("cpu"))
            self._flags.write(torch.tensor(state["flags"]).float())


def _scaler(trainer: L.Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _report_file(trainer: L.Trainer) -> Path:
    return Path(trainer.default_root_dir) / "guard.json"


def _sentence(event: Mapping[str, Any]) -> str:
    start = f"step {event['step']} had a non-finite {event['quantity']}"
    if event["module"] is None:
        return f"{start}, which its batches did not show again (an auxiliary loss, or a passing fault)"
    return f"{start}, first in {whole_name(event['module'])} ({event['where']}: {event['what']}; rank {event['rank']})"


def _raise_group(trainer: L.Trainer, module: str | None, step: int) -> bool:
    """Whether a precision scheduler took the module's group up."""
    if module is None:
        return False
    raisers: list[Callable[..., Any]] = [c.raise_group for c in trainer.callbacks if hasattr(c, "raise_group")]  # type: ignore[attr-defined]
    return any([raise_group(module, step, float("inf")) is not False for raise_group in raisers])  # noqa: C419
