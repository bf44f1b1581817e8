"""routing/layer_N/load in W&B: tokens of each expert, a histogram an interval of method/routing, a bar an expert.

W&B draws a series of histograms as a heat map: steps across, experts up, load as colour. The loads are those of all
ranks; they leave the device when it is idle (after_log.py). Of more than `MOST` MoE layers every k-th is shown; the
report's own heat map shows all of them at the end.
"""

from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qdeepseek.train.after_log import device_is_idle
from qdeepseek.train.callbacks.routing import Routing
from qdeepseek.train.layer_names import MOST


class ExpertLoads(Callback):
    """routing: the callback that counts; it stands before this one. wandb: the run's W&B logger."""

    def __init__(self, routing: Routing, wandb: Any):
        self.routing, self.wandb = routing, wandb
        self._step: int | None = None
        self._pending: tuple[int, list[int], Tensor] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        last = self.routing.last_interval
        self._step = None if last is None else last[0]

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if device_is_idle(trainer):
            self._emit()

    def on_train_batch_end(self, *args: Any) -> None:
        last = self.routing.last_interval
        if last is not None and last[0] != self._step:
            self._step, self._pending = last[0], last

    def on_train_end(self, *args: Any) -> None:
        self._emit()

    def _emit(self) -> None:
        if self._pending is None:
            return
        import wandb

        (step, layers, loads_ME), self._pending = self._pending, None
        edges, stride = np.arange(loads_ME.shape[1] + 1), -(-len(layers) // MOST)
        shown = list(zip(layers, loads_ME.cpu().numpy(), strict=True))[::stride]
        histograms = {f"routing/layer_{n}/load": wandb.Histogram(np_histogram=(load, edges)) for n, load in shown}
        self.wandb.log_metrics(histograms, step=step - 1)
