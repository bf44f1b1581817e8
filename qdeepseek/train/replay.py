"""The batches of a failed optimizer step once more, to find the module in which it failed (train/fault.py).

Batches are a function of their number (data/order.py), so none has to be kept in memory. Every rank runs its own; the
finding that comes first in order of weight, forward, backward, then batch, then rank is everybody's. Weights and
gradients are left alone. Without auxiliary losses, which may reduce over ranks, and without loss scaling. Under ZeRO-3
forward and backward gather weights from all ranks, so that each rank runs all of them, whatever it found before.
"""

from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from torch import Tensor

from qdeepseek.train.fault import Fault, find_fault, is_finite, nonfinite_tensor
from qdeepseek.train.zero import engine_of, is_partitioned, without_reduction

ORDER = ("weight", "forward", "backward")
NOTHING = {"module": None, "where": None, "what": None, "rank": None, "batch": None}


def replay(trainer: L.Trainer, pl_module: Any, consumed: int) -> dict[str, Any]:
    """First finding of all ranks: module, where, what (see Fault), rank, and the number of that rank's batch.

    consumed: batches used up when the step was taken. All values are None when everything is finite this time.
    """
    own = _search(trainer, pl_module, range(consumed - trainer.accumulate_grad_batches, consumed))
    found = [own]
    if trainer.world_size > 1:
        found = [None] * trainer.world_size
        torch.distributed.all_gather_object(found, own)
    ranked = [(ORDER.index(f[0].where), f[1], rank) for rank, f in enumerate(found) if f is not None]
    if not ranked:
        return dict(NOTHING)
    _, batch, rank = min(ranked)
    fault = found[rank]
    assert fault is not None
    return {**asdict(fault[0]), "rank": rank, "batch": batch}


def _search(trainer: L.Trainer, pl_module: Any, batches: range) -> tuple[Fault, int] | None:
    together = is_partitioned(pl_module.model.parameters())
    fault = nonfinite_tensor(pl_module.model)
    found = None if fault is None else (fault, batches[0])
    devices = [pl_module.device] if pl_module.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for number in batches:
            if found is not None and not together:
                break
            fault = _run(trainer, pl_module, number, together)
            if found is None and fault is not None:
                found = fault, number
    return found


def _run(trainer: L.Trainer, pl_module: Any, number: int, together: bool) -> Fault | None:
    """Forward and backward of one batch; a non-finite loss of finite modules is the head's or the teacher's."""
    batch = trainer.strategy.batch_to_device(trainer.datamodule.batch(number))  # type: ignore[attr-defined]
    parts: list[Tensor] = []

    distill, engine = pl_module.distill_weight > 0, engine_of(trainer)

    def loss() -> Tensor:
        with trainer.precision_plugin.forward_context():
            if engine is None or engine.zero_optimization_stage() < 3:
                parts[:] = pl_module.losses(batch, distill)
            else:  # as a step does, so that ZeRO-3 gathers and its order of modules is the usual one
                redirect: Any = trainer.strategy._forward_redirection
                parts[:] = redirect(engine, pl_module, "losses", batch, distill)
        return parts[0] + parts[1]

    model = pl_module.model
    with without_reduction(model):
        fault = find_fault(model, loss, to_the_end=together)
    if fault != Fault("", "forward", "loss"):
        return fault
    if is_finite(parts[0].detach()):
        return Fault("teacher", "forward", "distillation loss")
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    return Fault(head, "forward", "logits or loss")
