"""Gradients, scales and codes by decoder layer, every `every` optimizer steps; no sync, few names.

    gradient_norm/STAGE/LAYER       sqrt(mean over micro-batches and ranks of |dL_m/dθ_layer|^2), L_m the loss of one
    codes_at_limits/STAGE/LAYER     share of codes at qmin or qmax
    rounding_error/STAGE/LAYER      |w_hat - w| / |w|
    scale_change/STAGE/LAYER        |s / s_0 - 1|, mean; scale_change_max its largest. s_0: as first seen

Gradients are seen by hooks on the parameters, before any reduction: a rank's own, of one micro-batch, which every
strategy shows alike (under ZeRO `.grad` is gone after the backward). So the norm holds the noise of a micro-batch; it
compares layers and shows a layer that explodes or starves, and `STAGE/gradient_norm` (gradient_norm.py) is that of the
step. Learned scales, which have a learning rate of their own, are left out.

Weights are seen in the forward of a step's first micro-batch, where they are whole under ZeRO-3 too, at most
`MOST_GROUPS` groups of each (quant/sampled.py); tensors of a layer count by their size. A weight above its target level
or not yet fake-quantised is left out. The sampled s_0 are in the checkpoint.

Hooks exist in measured steps alone: the last of every interval and of the fit. The numbers wait on the device until
Lightning's own logging has read it (after_log.py).
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from qdeepseek.layers import WeightQuantizer
from qdeepseek.quant.sampled import grid_statistics, sample_groups, scale_change
from qdeepseek.routing.ranks import ranks, sum_over_ranks
from qdeepseek.surgery.prepare import quantized_tensors
from qdeepseek.train.after_log import device_is_idle, emit
from qdeepseek.train.layer_names import REST, block_names, layer_of

MOST_GROUPS = 4096
WEIGHT_NAMES = ("codes_at_limits", "rounding_error", "scale_change", "scale_change_max")


class LayerStatistics(Callback):
    """every: optimizer steps between two measurements."""

    def __init__(self, every: int = 50):
        self.every = every
        self.first: dict[str, Tensor] = {}  # sampled scales by weight, as first seen
        self._handles: list[RemovableHandle] = []
        self._squares: Tensor | None = None  # by block, of the micro-batches so far; None: not a measured step
        self._weights: dict[str, list[tuple[int, Tensor]]] = {}  # by block: (elements, statistics) of each tensor
        self._pending: tuple[int, Tensor, dict[str, Tensor]] | None = None
        self._counting = False
        self._batches = self._step = 0
        self._loss_scale: Any = 1.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model: Any = pl_module.model
        names = block_names(int(model.config.num_hidden_layers))
        self._blocks = [*dict.fromkeys(names), REST]

        def block(name: str) -> str:
            layer = layer_of(name)
            return REST if layer is None else names[layer]

        scales = {id(p) for m in model.modules() if isinstance(m, WeightQuantizer) for p in m.parameters(recurse=False)}
        self._parameters = [
            (p, self._blocks.index(block(name)))
            for name, p in model.named_parameters()
            if p.requires_grad and id(p) not in scales
        ]
        self._quantizers = [(t.quantizer, t.name, block(t.name)) for t in quantized_tensors(model)]
        self.first = {name: scale.to(pl_module.device) for name, scale in self.first.items()}
        self._step = trainer.global_step

    # --- a step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if device_is_idle(trainer):
            self._emit(trainer, pl_module)
        if not self._handles:
            self._watch(pl_module.device, trainer.global_step + 1, trainer.max_steps)
        self._counting = True

    def _watch(self, device: torch.device, done: int, last: int) -> None:
        measured = done % self.every == 0 or done == last
        if measured:
            self._squares = torch.zeros(len(self._blocks), device=device)
            for parameter, row in self._parameters:
                self._handles.append(parameter.register_hook(self._gradient_hook(row)))
        if measured or not self.first:
            for quantizer, name, block in self._quantizers:
                # before what others hang there: ZeRO-3 lets a learned scale go after the forward of its module
                hook = self._weight_hook(name, block)
                self._handles.append(quantizer.register_forward_hook(hook, prepend=True))

    def _gradient_hook(self, row: int) -> Any:
        def add(grad: Tensor) -> None:
            if self._counting and self._squares is not None:
                self._squares[row] += torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).square()

        return add

    def _weight_hook(self, name: str, block: str) -> Any:
        seen = False

        def look(quantizer: WeightQuantizer, inputs: tuple[Tensor], output: Tensor) -> None:
            nonlocal seen
            if seen or not self._counting or not quantizer.enabled or quantizer.level != "target":
                return
            seen = True
            w = inputs[0]
            sample = sample_groups(w, *quantizer.served_scale(w), MOST_GROUPS)
            first = self.first.setdefault(name, sample[1].clone())
            if self._squares is not None:
                parts = [grid_statistics(sample, quantizer.scheme), scale_change(sample[1], first)]
                self._weights.setdefault(block, []).append((w.numel(), torch.cat(parts).float()))

        return look

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._counting = False  # whatever runs a batch again from here on is no part of the step
        self._batches += 1
        if self._squares is not None:
            self._loss_scale = _loss_scale(trainer)  # as it is before the step, which may change it

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step, batches, self._batches = trainer.global_step, self._batches, 0
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._squares is None:
            return
        scale = batches / self._loss_scale  # the loss of a micro-batch was divided by their number
        norms = sum_over_ranks(self._squares).div(ranks() * batches).sqrt() * scale
        self._pending = (self._step - 1, norms, {b: _by_size(found) for b, found in self._weights.items()})
        self._squares, self._weights = None, {}

    # --- out

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._emit(trainer, pl_module)

    def _emit(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._pending is None:
            return
        (step, norms, weights), self._pending = self._pending, None
        stage, metrics = pl_module.stage, {}
        present = {self._blocks[row] for _, row in self._parameters}
        for block, norm in zip(self._blocks, norms.tolist(), strict=True):
            if block in present:
                metrics[f"gradient_norm/{stage}/{block}"] = norm
        for block, values in weights.items():
            for name, value in zip(WEIGHT_NAMES, values.tolist(), strict=True):
                metrics[f"{name}/{stage}/{block}"] = value
        emit(trainer, metrics, step)

    def state_dict(self) -> dict[str, Any]:
        return {"first": {name: scale.cpu() for name, scale in self.first.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first = dict(state_dict["first"])


def _by_size(found: list[tuple[int, Tensor]]) -> Tensor:
    """(4,) WEIGHT_NAMES of a block from its tensors: elements of each, and (limits, error, square, change, largest)."""
    total = sum(size for size, _ in found)
    at_limits, error, square, change, _ = torch.stack([values * (size / total) for size, values in found]).sum(0)
    largest = torch.stack([values[4] for _, values in found]).amax()
    return torch.stack([at_limits, (error / square.clamp_min(1e-30)).sqrt(), change, largest])


def _loss_scale(trainer: L.Trainer) -> Any:
    """Factor on the loss of the backward just done: 1 outside of fp16; a tensor on the device under a GradScaler."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        return scaler._scale.clone()
    return getattr(trainer.optimizers[0], "loss_scale", 1.0)
