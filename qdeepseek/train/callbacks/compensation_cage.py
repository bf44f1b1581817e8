"""method/compensation=cage: quantised weights are pulled towards their grid after each step (compensate/cage.py).

A hook behind the optimizer's step: a step that is not taken (fp16 overflow, a guard) pulls nothing, micro-batches of an
accumulation count once, and every rank does the same, since weights and the optimizer's state are the same. lambda_t
is a function of the global step, so a checkpoint needs nothing of it. Works on the weights that the optimizer holds:
not with a wrapper that keeps its own copy or a shard (DeepSpeed's ZeRO), which is refused; and with bf16 weights
(`precision: bf16-true`) a pull below half a bf16 step, |w| / 512, is rounded away.
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
        self._tensors: list[tuple[QuantizedTensor, dict[str, Any]]] = []
        self._remove: list[Callable[[], Any]] = []
        self._step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        if not isinstance(optimizer, torch.optim.Adam):
            raise ValueError(
                f"method.compensation: CAGE needs torch's Adam or AdamW on unsharded weights, not "
                f"{type(optimizer).__name__}; choose another strategy, or method/compensation=off"
            )
        owners = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        quantised = quantized_tensors(pl_module.model)  # type: ignore[arg-type]
        self._tensors = [(t, owners[id(t.weight)]) for t in quantised if id(t.weight) in owners]
        if not self._tensors:
            raise ValueError(
                "method.compensation: the optimizer trains no quantised weight itself, so CAGE has nothing to pull; "
                "choose method/compensation=off"
            )
        self._step = trainer.global_step

        def after_step(*_: Any) -> None:
            skipped: Any = getattr(pl_module, "step_skipped", None)
            self._pull(optimizer, self._lambda(trainer, trainer.global_step), skipped)

        self._remove.append(optimizer.register_step_post_hook(after_step).remove)

    def _lambda(self, trainer: L.Trainer, step: int) -> float:
        return strength(step, int(trainer.max_steps), self.strength, self.silence, self.ramp)

    @torch.no_grad()
    def _pull(self, optimizer: torch.optim.Optimizer, now: float, skipped: Tensor | None) -> None:
        """skipped: 1 on the device where the optimizer left the weights alone, which this does then too."""
        for tensor, group in self._tensors:
            w, rate = tensor.weight, float(group["lr"]) * now
            if rate == 0 or w.grad is None or not tensor.quantizer.enabled:
                continue
            denominator: Tensor | None = None
            if self.metric == "identity":
                state = optimizer.state[w]
                denominator = adam_denominator(state["exp_avg_sq"], state["step"], group["betas"][1], group["eps"])
            tensor.quantizer.clear_cache()  # this hook runs before the one that tells the cache of the step
            w_hat = tensor.quantizer(w)
            if skipped is not None:
                w_hat = torch.where(skipped > 0, w, w_hat)
                denominator = None if denominator is None else torch.where(skipped > 0, 1.0, denominator)
            pull_(w, w_hat, rate, denominator)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step = trainer.global_step
        if self._step % self.log_every:
            return
        now = self._lambda(trainer, self._step - 1)
        pl_module.log("compensation/lambda", now)
        for tensor, _ in self._tensors:
            w = tensor.weight
            error = (w - tensor.quantizer(w)).norm() / w.norm().clamp_min(torch.finfo(w.dtype).tiny)
            pl_module.log(f"compensation/{tensor.name}/error", error)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        while self._remove:
            self._remove.pop()()
