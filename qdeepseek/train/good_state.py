"""A copy on the host of everything an optimizer step changes: weights, learned scales, buffers, optimizer moments.

Costs one copy of the model and of the optimizer's state in host memory (12 bytes a parameter in fp32 with Adam), and
reading it from the device when it is made. Of the replicas of data-parallel training one rank keeps it and sends it
to the others. Restoring writes in place, so that DDP, parameter groups and learning-rate schedules stay valid.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdeepseek.layers import WeightQuantizer


@dataclass(frozen=True)
class GoodState:
    """State after optimizer step `step`. `moments` has one entry for each parameter, in the optimizer's order."""

    step: int
    tensors: dict[str, Tensor]
    moments: list[dict[str, Tensor]]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}


def _moments(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [{k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor)} for p in parameters]


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}


def copy_state(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> GoodState:
    """Waits for the device."""
    return GoodState(step, _copy(_tensors(module)), [_copy(m) for m in _moments(optimizer)])


@torch.no_grad()
def restore_(state: GoodState | None, module: nn.Module, optimizer: torch.optim.Optimizer, broadcast: bool) -> None:
    """Write `state` back in place; moments that did not exist yet become zero, as Adam begins.

    broadcast: take every tensor from rank 0, the only rank that needs `state` then.
    """

    def put(tensor: Tensor, saved: Tensor | None) -> None:
        if saved is not None:
            tensor.copy_(saved)
        if broadcast:
            torch.distributed.broadcast(tensor, src=0)

    for name, tensor in _tensors(module).items():
        put(tensor, None if state is None else state.tensors.get(name))
    for index, own in enumerate(_moments(optimizer)):
        for name, tensor in own.items():
            put(tensor, None if state is None else state.moments[index].get(name, torch.zeros(())))
    for part in module.modules():
        if isinstance(part, WeightQuantizer):
            part.clear_cache()


def restore_checkpoint_(trainer: Any, path: str) -> None:
    """Under ZeRO: weights, moments and buffers of a checkpoint, each rank its part; counters of the run stay."""
    engine = trainer.model
    counters = {
        name: getattr(engine, name) for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    }
    trainer.strategy.load_checkpoint(path)  # which another number of ranks may have written
    for name, value in counters.items():
        setattr(engine, name, value)
    for part in engine.module.modules():
        if isinstance(part, WeightQuantizer):
            part.clear_cache()


def as_dict(state: GoodState | None) -> dict[str, Any] | None:
    """For a checkpoint."""
    return None if state is None else dict(vars(state))
