"""A signal stops the fit at the end of an optimizer step, with a checkpoint, on all ranks at the same step.

    stop_n = max over ranks (signal received before the end of step n)      one scalar all_reduce a step
    host (gloo): acted on at the end of step n;  CUDA (NCCL): of step n + 1

On the device the maximum is copied to the host behind the step's kernels and read a step later, so the host never
waits. Never within an accumulation: its gradients are in no checkpoint. One rank's signal is enough.

Lightning's own handling of SIGTERM is replaced for the fit: its handler broadcasts from within the signal, into
whatever collective is running, and its loop broadcasts twice and waits for the device before every micro-batch.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import Tensor

from qdeepseek.train.stop import Stopped, StopRequest


class _OwnHandlers(_SignalConnector):
    """Leaves the process's signal handlers as they are."""

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False


class Agreement:
    """The maximum over ranks of a flag: of this call on the host, of the call before on CUDA."""

    def __init__(self, device: torch.device, ranks: int):
        self.device, self.ranks = device, ranks
        self._host = torch.zeros((), pin_memory=device.type == "cuda")
        self._arrived: torch.cuda.Event | None = None

    def _reduced(self, flag: bool) -> Tensor:
        value = torch.full((), float(flag), device=self.device)
        if self.ranks > 1:
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
        return value

    def now(self, flag: bool) -> bool:
        """All ranks' flags at this moment; waits for the device."""
        return bool(self._reduced(flag))

    def __call__(self, flag: bool) -> bool:
        if self.ranks == 1:
            return flag
        if self.device.type != "cuda":
            return self.now(flag)
        if self._arrived is not None:
            self._arrived.synchronize()
        before = bool(self._host)
        self._host.copy_(self._reduced(flag), non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()
        return before


class Preemption(Checkpoint):
    """Raises Stopped when `request` has a signal. A Checkpoint, so that it acts after all callbacks that have state.

    Args:
        request: set by the signal handlers of stop.py.
    """

    def __init__(self, request: StopRequest):
        self.request = request
        self._step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        trainer._signal_connector = _OwnHandlers(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._agreed = Agreement(trainer.strategy.root_device, trainer.world_size)
        if self._agreed.now(self.request.signal is not None):
            raise Stopped(f"before step {self._step + 1}")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if not self._agreed(self.request.signal is not None):
            return
        trainer.checkpoint_callback.save_now(trainer)  # type: ignore[union-attr]
        trainer._logger_connector.update_train_step_metrics()  # else only after this hook: the step's row in the logs
        stage = getattr(pl_module, "stage", "the fit")
        raise Stopped(f"after step {self._step} of {trainer.max_steps} of {stage}")
