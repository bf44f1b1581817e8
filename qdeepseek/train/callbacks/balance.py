"""Loss-free balancing of sigmoid routers during training (routing/bias.py), and its load statistics.

Hooks on the routers add up the tokens of every expert on the device; after each optimizer step the counts of
all layers are all-reduced in one call and the bias of each router moves by `speed`. A forward without gradient
(validation, the recomputed half of gradient checkpointing runs with it) is told apart by `module.training` and
counted once: recomputation happens in the backward, where counting is off.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from qdeepseek.routing.bias import update_bias_
from qdeepseek.routing.load import expert_load, load_entropy, max_violation
from qdeepseek.routing.ranks import sum_over_ranks


class LossFreeBalance(Callback):
    """b_e += speed · sign(mean load − load_e) after each optimizer step, for every router with a bias buffer."""

    def __init__(self, speed: float = 1e-3, log_every: int = 50):
        self.speed, self.log_every = speed, log_every
        self.routers: dict[str, nn.Module] = {}
        self._load_ME = torch.empty(0)
        self._counting = False
        self._step = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.routers = {n: m for n, m in pl_module.named_modules() if hasattr(m, "e_score_correction_bias")}
        if not self.routers:
            raise ValueError(
                "method.balance_speed: the model has no router with e_score_correction_bias; set method.balance_speed=0"
            )
        biases = [m.e_score_correction_bias for m in self.routers.values()]
        self._load_ME = torch.zeros(len(biases), len(biases[0]), device=pl_module.device)  # type: ignore[arg-type]
        for row, router in enumerate(self.routers.values()):
            router.register_forward_hook(self._hook(row))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step  # restored only after on_fit_start

    def _hook(self, row: int) -> Any:
        def count(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            if self._counting and module.training:
                self._load_ME[row] += expert_load(output[2], self._load_ME.shape[1])

        return count

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._counting = True

    def on_before_backward(self, *args: Any, **kwargs: Any) -> None:
        self._counting = False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step = trainer.global_step
        load_ME = sum_over_ranks(self._load_ME)
        skipped = getattr(pl_module, "step_skipped", None)
        counted_ME = load_ME if skipped is None else load_ME * (1 - skipped)  # no load, no move: sign(0 − 0) = 0
        for load_E, router in zip(counted_ME, self.routers.values(), strict=True):
            update_bias_(router.e_score_correction_bias, load_E, self.speed)  # type: ignore[arg-type]
        if self._step % self.log_every == 0:
            pl_module.log("routing/load_entropy_bits", load_entropy(load_ME).mean())
            pl_module.log("routing/max_violation", max_violation(load_ME).mean())
            pl_module.log("routing/dead_experts", (load_ME == 0).sum().float())
        self._load_ME.zero_()
