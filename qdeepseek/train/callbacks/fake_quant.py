"""When weights are fake-quantised: off before `delay` optimizer steps, on from then to the end of the fit.

The phase is a function of the global step alone, so a resumed run is in the same phase as the unbroken one.
With the cache on, a weight is fake-quantised once an optimizer step instead of once a micro-batch; the cache
costs one copy of the quantised weights. Under accumulation learned scales get their gradient once an optimizer step,
from the accumulated (and reduced) gradient of the weight; DDP is told not to wait for them in the backward. Where a
strategy shards gradients (DeepSpeed, FSDP) there is no such gradient, and every backward computes the scales' own.
Where it shards weights too (ZeRO-3) the cache would hold the whole model on every rank, and is off.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from qdeepseek.layers import ActivationQuantizer, WeightQuantizer
from qdeepseek.layers.kv_cache import CacheQuantizer
from qdeepseek.surgery.prepare import QuantizedTensor, quantized_tensors


class FakeQuant(Callback):
    """Delayed fake-quantisation and the weight cache of all quantisers of the student."""

    def __init__(self, delay: int = 0, cache: bool = False, recompute: bool = False):
        self.delay, self.cache, self.recompute = delay, cache, recompute
        self._on: bool | None = None
        self._deferred: list[QuantizedTensor] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before DDP wraps the module: choose the scales whose gradient can wait for the end of the accumulation."""
        sharded = isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy)
        if self.cache and getattr(trainer.strategy, "zero_stage_3", False):
            rank_zero_warn("method.cache: off under ZeRO-3, where every rank would keep all quantised weights whole")
            self.cache = False
        self._deferred = []
        if trainer.accumulate_grad_batches == 1 or sharded:
            return
        for tensor in quantized_tensors(pl_module):
            tensor.quantizer.defer = True
            if tensor.quantizer.defers(tensor.weight):
                self._deferred.append(tensor)
        scales = {id(tensor.quantizer.scale) for tensor in self._deferred}
        ignored = [name for name, p in pl_module.named_parameters() if id(p) in scales]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(pl_module, ignored)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for tensor in self._deferred:
            tensor.quantizer.set_scale_grad(tensor.weight)

    def _set(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        on = trainer.global_step >= self.delay
        if on == self._on:
            return
        self._on = on
        for module in pl_module.modules():
            if isinstance(module, WeightQuantizer):
                module.enabled, module.cache, module.recompute = on, self.cache, self.recompute
            elif isinstance(module, ActivationQuantizer | CacheQuantizer):
                module.enabled = on

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._set(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._set(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, WeightQuantizer):
                module.enabled, module.cache, module.recompute, module.defer = True, False, False, False
            elif isinstance(module, ActivationQuantizer | CacheQuantizer):
                module.enabled = True
