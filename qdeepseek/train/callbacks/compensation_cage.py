"""method/compensation=cage: quantised weights are pulled towards their grid after each step (compensate/cage.py).

A hook behind the optimizer's step: a step that is not taken (fp16 overflow, a guard) pulls nothing, micro-batches of an
accumulation count once, and every rank does the same, since weights and the optimizer's state are the same. lambda_t
is a function of the global step, so a checkpoint needs nothing of it. Works on the weights that the optimizer holds:
with bf16 weights (`precision: bf16-true`) a pull below half a bf16 step, |w| / 512, is rounded away. Under ZeRO, which
keeps fp32 copies of its own, weights are pulled after the step and the copies follow; at stage 3 that gathers every
quantised weight once a step. Its second moments lie in pieces, so metric `identity` is refused there.
Logged: compensation/lambda, compensation/rate (lr * lambda_t) and, a weight,
compensation/<weight>/error = ||w - Q(w)|| / ||w||.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qdeepseek.compensate.cage import METRICS, adam_denominator, pull_, strength
from qdeepseek.surgery.prepare import QuantizedTensor, quantized_tensors
from qdeepseek.train.config import ConfigError
from qdeepseek.train.zero import ZeroConfig, engine_of, gathered, refresh, torch_optimizer


class Cage(Callback):
    """w -= lr * lambda_t * (w - Q(w)), in the metric of Adam's second moment.

    strength: lambda at the end of the run; silence: share of the run without correction; ramp: up to `strength`
    along a line, else at once; metric: `adam` or `identity`.
    """

    def __init__(
        self,
        strength: float = 10.0,
        silence: float = 0.8,
        ramp: bool = True,
        metric: str = "adam",
        log_every: int = 50,
    ):
        if strength < 0 or not 0 <= silence <= 1 or log_every < 1:
            raise ValueError(
                f"strength {strength} must not be negative, silence {silence} must lie in [0, 1], log_every "
                f"{log_every} be at least 1"
            )
        if metric not in METRICS:
            raise ValueError(f"metric {metric!r} is unknown; use one of {', '.join(METRICS)}")
        self.strength, self.silence, self.ramp, self.metric = strength, silence, ramp, metric
        self.log_every = log_every
        self._tensors: list[QuantizedTensor] = []
        self._engine: Any = None
        self._rate = 0.0
        self._remove: list[Callable[[], Any]] = []
        self._step = 0

    def check(self, run: Any, model: torch.nn.Module) -> None:
        """Raises ConfigError, before anything is trained, for the metric that ZeRO has in pieces."""
        if isinstance(run.strategy, ZeroConfig) and self.metric != "adam":
            raise ConfigError(
                f"method.compensation.metric {self.metric} needs Adam's second moment whole, and strategy "
                f"{run.strategy.name} keeps it in pieces; use metric=adam, or strategy ddp or auto"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        optimizer = torch_optimizer(trainer)
        if not isinstance(optimizer, torch.optim.Adam):
            raise ValueError(
                f"method.compensation: CAGE needs torch's Adam or AdamW, not {type(optimizer).__name__}; choose "
                f"another strategy, or method/compensation=off"
            )
        self._tensors = [t for t in quantized_tensors(pl_module.model) if t.weight.requires_grad]  # type: ignore[arg-type]
        if not self._tensors:
            raise ValueError(
                "method.compensation: the optimizer trains no quantised weight itself, so CAGE has nothing to pull; "
                "choose method/compensation=off"
            )
        self._step, self._engine = trainer.global_step, engine_of(trainer)
        if self._engine is not None:
            return

        def after_step(*_: Any) -> None:
            skipped: Any = getattr(pl_module, "step_skipped", None)
            self._pull(optimizer, self._lambda(trainer, trainer.global_step), skipped)

        self._remove.append(optimizer.register_step_post_hook(after_step).remove)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._rate = float(optimizer.param_groups[0]["lr"]) * self._lambda(trainer, trainer.global_step)

    def _lambda(self, trainer: L.Trainer, step: int) -> float:
        return strength(step, int(trainer.max_steps), self.strength, self.silence, self.ramp)

    @torch.no_grad()
    def _pull(self, optimizer: torch.optim.Optimizer, now: float, skipped: Tensor | None) -> None:
        """skipped: 1 on the device where the optimizer left the weights alone, which this does then too."""
        owners = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for tensor in self._tensors:
            w, group = tensor.weight, owners[id(tensor.weight)]
            rate = float(group["lr"]) * now
            if rate == 0 or w.grad is None or not tensor.quantizer.enabled:
                continue
            denominator: Tensor | None = None
            if self.metric == "identity":
                state = optimizer.state[w]
                denominator = adam_denominator(state["exp_avg_sq"], state["step"], group["betas"][1], group["eps"])
                denominator = denominator if skipped is None else torch.where(skipped > 0, 1.0, denominator)
            pull_(w, self._target(tensor, skipped), rate, denominator)

    def _target(self, tensor: QuantizedTensor, skipped: Tensor | None) -> Tensor:
        tensor.quantizer.clear_cache()  # the weight has just been written, which nobody has told the cache yet
        w_hat = tensor.quantizer(tensor.weight)
        return w_hat if skipped is None else torch.where(skipped > 0, tensor.weight, w_hat)

    @torch.no_grad()
    def _pull_after(self, trainer: L.Trainer, skipped: Tensor | None) -> None:
        """Under ZeRO, behind its step: every rank pulls the same weights, then its own fp32 copies follow."""
        if self._rate == 0 or self._engine is None or self._engine.optimizer.overflow:
            return
        for tensor in self._tensors:
            if not tensor.quantizer.enabled:
                continue
            with gathered(tensor.quantizer.parameters()), gathered([tensor.weight], write=True):
                pull_(tensor.weight, self._target(tensor, skipped), self._rate)
                tensor.quantizer.clear_cache()
        refresh(trainer)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step = trainer.global_step
        if self._engine is not None:
            self._pull_after(trainer, getattr(pl_module, "step_skipped", None))
        if self._step % self.log_every:
            return
        now = self._lambda(trainer, self._step - 1)
        pl_module.log("compensation/lambda", now)
        for tensor in self._tensors:
            w = tensor.weight
            with gathered([w, *tensor.quantizer.parameters()]):
                error = (w - tensor.quantizer(w)).norm() / w.norm().clamp_min(torch.finfo(w.dtype).tiny)
            pl_module.log(f"compensation/{tensor.name}/error", error)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        while self._remove:
            self._remove.pop()()
