"""When weights are fake-quantised: off before `delay` optimizer steps, on from then to the end of the fit.

The phase is a function of the global step alone, so a resumed run is in the same phase as the unbroken one.
With the cache on, a weight is fake-quantised once an optimizer step instead of once a micro-batch; the cache
costs one copy of the quantised weights.
"""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from qdeepseek.layers import ActivationQuantizer, WeightQuantizer


class FakeQuant(Callback):
    """Delayed fake-quantisation and the weight cache of all quantisers of the student."""

    def __init__(self, delay: int = 0, cache: bool = False, recompute: bool = False):
        self.delay, self.cache, self.recompute = delay, cache, recompute
        self._on: bool | None = None

    def _set(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        on = trainer.global_step >= self.delay
        if on == self._on:
            return
        self._on = on
        for module in pl_module.modules():
            if isinstance(module, WeightQuantizer):
                module.enabled, module.cache, module.recompute = on, self.cache, self.recompute
            elif isinstance(module, ActivationQuantizer):
                module.enabled = on

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._set(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._set(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, WeightQuantizer):
                module.enabled, module.cache, module.recompute = True, False, False
            elif isinstance(module, ActivationQuantizer):
                module.enabled = True
