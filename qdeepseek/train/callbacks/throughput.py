"""How fast a stage trains and what memory it takes, once a `trainer.log_every` optimizer steps.

    throughput/STAGE/tokens_per_second     tokens without padding, all ranks, over the seconds of their steps
    throughput/STAGE/tokens                of the stage so far, all ranks; in the checkpoint
    throughput/STAGE/step_seconds_p50, _p95   of the last `RECENT` optimizer steps
    throughput/STAGE/model_tflops          model FLOP/s of one device, in 1e12 (flops.py; teacher included)
    throughput/STAGE/mfu                   that over the device's peak; not reported where the peak is not known
    memory/STAGE/device_peak_gib           most that CUDA's allocator held in the stage, the largest of all ranks
    memory/STAGE/process_peak_gib          most resident memory of a process so far, the largest of all ranks

Tokens and attended keys are counted on the device. A step lasts from the end of the one before to its own, data loading
included, validation and the writing of checkpoints not; on CUDA between events in the stream, which say what the device
did and not when the host was ready to go on. All is read when the next batch begins and Lightning's logging has just
waited for the device (after_log.py); only the counts go through two small all_reduces.
"""

import resource
import statistics
import sys
import time
from collections import deque
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qdeepseek.routing.ranks import ranks, sum_over_ranks
from qdeepseek.train.after_log import device_is_idle, emit
from qdeepseek.train.flops import TokenFlops, forward_flops, peak_flops, tokens_and_keys, training_flops

RECENT = 200


class StepClock:
    """Seconds of each step without its pauses; marks lie in the device's stream where there is one."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._open: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._steps: list[list[tuple[Any, Any]]] = []

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resume(self) -> None:
        if self._open is None:
            self._open = self._mark()

    def pause(self) -> None:
        if self._open is not None:
            self._spans.append((self._open, self._mark()))
            self._open = None

    def step(self) -> None:
        """A step ends, the next begins."""
        self.pause()
        self._steps.append(self._spans)
        self._spans = []
        self.resume()

    def read(self) -> list[float]:
        """Seconds of the steps that ended since the last call; on CUDA it waits for the last of them."""
        steps, self._steps = self._steps, []
        if self._cuda and steps:
            steps[-1][-1][1].synchronize()
        return [sum(self._seconds(a, b) for a, b in spans) for spans in steps]

    def _seconds(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1e3 if self._cuda else b - a


class Throughput(Callback):
    """peak_tflops: peak of one device in 1e12 FLOP/s; None takes it from the device's name, a CPU has none."""

    def __init__(self, peak_tflops: float | None = None):
        self.peak = None if peak_tflops is None else peak_tflops * 1e12
        self.tokens = 0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._counts = torch.zeros(2, dtype=torch.int64)
        self._clock = StepClock(torch.device("cpu"))
        self._ended: int | None = None  # last step of an interval whose numbers are not out yet

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model: Any = pl_module.model
        teacher: Any = pl_module.teacher
        self._flops: TokenFlops = training_flops(model)
        if teacher is not None:
            self._flops += forward_flops(teacher)
        self._device, self._step = pl_module.device, trainer.global_step
        self.peak = self.peak or peak_flops(self._device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._clock, self._ended = StepClock(self._device), None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: dict[str, Tensor], *args: Any
    ) -> None:
        if device_is_idle(trainer):
            self._emit(trainer, pl_module)
        self._clock.resume()
        self._counts += tokens_and_keys(batch)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step = trainer.global_step
        self._clock.step()
        if device_is_idle(trainer):  # as soon as Lightning has logged this step
            self._ended = self._step - 1

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock.pause()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._clock.pause()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clock.resume()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ended = self._step - 1
        self._emit(trainer, pl_module)

    def _emit(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._ended is None:
            return
        step, self._ended = self._ended, None
        seconds = self._clock.read()
        if not seconds:
            return
        tokens, keys = sum_over_ranks(self._counts).tolist()
        self._counts.zero_()
        self._recent.extend(seconds)
        self.tokens += tokens
        at, total = f"throughput/{pl_module.stage}", sum(seconds)
        flops = self._flops.of(tokens, keys) / total / ranks()
        cuts = statistics.quantiles(self._recent, n=20, method="inclusive") if len(self._recent) > 1 else seconds * 19
        metrics = {
            f"{at}/tokens_per_second": tokens / total, f"{at}/tokens": self.tokens,
            f"{at}/step_seconds_p50": cuts[9], f"{at}/step_seconds_p95": cuts[18], f"{at}/model_tflops": flops / 1e12,
        }  # fmt: skip
        if self.peak is not None:
            metrics[f"{at}/mfu"] = flops / self.peak
        emit(trainer, {**metrics, **self._memory(f"memory/{pl_module.stage}")}, step)

    def _memory(self, at: str) -> dict[str, float]:
        cuda = self._device.type == "cuda"
        peaks = [process_peak(), torch.cuda.max_memory_allocated(self._device) if cuda else 0]
        largest = torch.tensor(peaks, dtype=torch.float64, device=self._device)
        if ranks() > 1:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        process, device = (largest / 2**30).tolist()
        return {f"{at}/process_peak_gib": process, **({f"{at}/device_peak_gib": device} if cuda else {})}

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens + sum_over_ranks(self._counts).tolist()[0]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = state_dict["tokens"]


def process_peak() -> int:
    """Bytes of resident memory that this process had at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
