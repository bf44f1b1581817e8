"""When a number may leave the device without a wait: right after Lightning's own logging has waited for the device.

Lightning turns logged tensors into numbers in every `trainer.log_every`-th optimizer step, and the device is idle then.
A callback keeps what it measured on the device until the next batch begins, and asks here whether that was such a step.
"""

from collections.abc import Mapping

import lightning as L


def device_is_idle(trainer: L.Trainer) -> bool:
    """Whether the step before this batch was one whose numbers Lightning read."""
    return trainer.global_step > 0 and trainer.global_step % max(1, trainer.log_every_n_steps) == 0  # type: ignore[attr-defined]


def emit(trainer: L.Trainer, metrics: Mapping[str, object], step: int) -> None:
    """Give numbers of optimizer step `step`, counted from 0 as Lightning does, to every logger; rank 0 writes."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=step)  # type: ignore[arg-type]
