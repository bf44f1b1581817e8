"""STAGE/gradient_norm: the norm of a step's gradient before clipping, at the steps that Lightning logs.

Of the accumulated gradient, averaged over ranks, as methods left it: what trainer.clip_norm is compared with. It stands
last among the callbacks. DeepSpeed computes it in its own step and shards what it is made of, so it is taken from
there; with ZeRO stage 0 in fp32 DeepSpeed has none.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy


class GradientNorm(Callback):
    """Logs the norm of all gradients of the optimizer."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if _sharded(trainer) or (trainer.global_step + 1) % max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            pl_module.log(f"{pl_module.stage}/gradient_norm", torch.nn.utils.get_total_norm(grads))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if not _sharded(trainer) or trainer.global_step % max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        engine: Any = trainer.model
        norm = engine.get_global_grad_norm()
        if norm is not None:
            pl_module.log(f"{pl_module.stage}/gradient_norm", torch.as_tensor(norm))


def _sharded(trainer: L.Trainer) -> bool:
    return isinstance(trainer.strategy, DeepSpeedStrategy)
