"""method/compensation=lsq: the gradients of learned scales, bounded a group (compensate/lsq.py).

Before the optimizer's step, and before the global norm is clipped: on the gradients of all micro-batches and, under
DDP, averaged over ranks, so every rank does the same and nothing has to be remembered.
FakeQuant, which under accumulation makes a scale's gradient at this same moment, stands before it in the callbacks.
Logged a weight: compensation/<weight>/fired, the share of groups whose scale gradient was bounded, and .../factor.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qdeepseek.compensate.lsq import normalise
from qdeepseek.surgery.prepare import QuantizedTensor, quantized_tensors
from qdeepseek.train.config import ConfigError
from qdeepseek.train.zero import ZeroConfig


class ScaleGradients(Callback):
    """limit: largest relative gradient of a scale, in units of the relative gradient of the weights it scales."""

    def __init__(self, limit: float = 1.0, log_every: int = 50):
        if limit <= 0 or log_every < 1:
            raise ValueError(f"limit {limit} must be positive and log_every {log_every} at least 1")
        self.limit, self.log_every = limit, log_every
        self._tensors: list[QuantizedTensor] = []
        self._counts = torch.empty(0)
        self._step = 0

    def check(self, run: Any, model: torch.nn.Module) -> None:
        """Raises ConfigError for a recipe without learned scales, before anything is trained."""
        if isinstance(run.strategy, ZeroConfig):
            raise ConfigError(
                f"method.compensation: lsq compares the gradients of scales and weights, which strategy "
                f"{run.strategy.name} leaves on no rank; use ddp or auto, or another method/compensation"
            )
        schemes = [rule.scheme for rule in run.recipe.rules if rule.scheme is not None]
        if not any(scheme.method.learned for scheme in schemes):
            raise ConfigError(
                f"method.compensation: recipe {run.recipe.name} learns no scale, so there is no gradient to bound; set "
                f"quant.schemes.main.method.learned=true, or method/compensation=off"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        quantised = quantized_tensors(pl_module.model)  # type: ignore[arg-type]
        self._tensors = [t for t in quantised if t.quantizer.method.learned and t.weight.requires_grad]
        if not self._tensors:
            raise ValueError(
                "method.compensation: no quantised weight is trained together with a learned scale; set "
                "quant.schemes.main.method.learned=true, or method/compensation=off"
            )
        self._counts = torch.zeros(len(self._tensors), 3, device=pl_module.device)  # steps, fired, factor

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step

    @torch.no_grad()
    def on_before_optimizer_step(self, *args: Any) -> None:
        for tensor, counts in zip(self._tensors, self._counts, strict=True):
            scale = tensor.quantizer.scale
            assert scale is not None
            if scale.grad is None or tensor.weight.grad is None:  # fake-quant is off, or the expert was not reached
                continue
            result = normalise(scale.grad, scale, tensor.weight.grad, tensor.weight, self.limit)
            scale.grad.copy_(result.grad)
            counts += torch.cat([torch.ones_like(result.fired), result.fired, result.factor])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step = trainer.global_step
        if self._step % self.log_every:
            return
        for tensor, (steps, fired, factor) in zip(self._tensors, self._counts, strict=True):
            count: Tensor = steps.clamp_min(1)
            pl_module.log(f"compensation/{tensor.name}/fired", fired / count)
            pl_module.log(f"compensation/{tensor.name}/factor", factor / count)
        self._counts.zero_()
