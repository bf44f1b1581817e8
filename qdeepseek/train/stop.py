"""A request to stop: the signal sets a flag, the work ends where nothing is lost, the job queues itself again.

    signal → request.signal → Stopped, raised        at the end of an optimizer step, agreed by all ranks, saved
                                                     at a fit's start, agreed by all ranks
                                                     at the end of a stage that a rank does alone (evaluation, export)
    Stopped → in a Slurm job: scontrol requeue, exit code 0; else or if refused: exit code 75 (EX_TEMPFAIL)

Between a fit and the next one ranks do not agree and only pass the flag on: one that left would strand the others in
their first collective.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from qdeepseek.train import slurm
from qdeepseek.train.config import build

RESUMABLE = os.EX_TEMPFAIL  # 75: not done, and started again it continues


@dataclass(frozen=True)
class StopConfig:
    """`signals` that stop a run; `requeue`: whether a Slurm job then queues itself again."""

    signals: tuple[str, ...] = ("SIGUSR1", "SIGTERM")
    requeue: bool = True

    def __post_init__(self) -> None:
        known = [name for name in signal.Signals.__members__ if name not in ("SIGKILL", "SIGSTOP")]
        for name in self.signals:
            if name not in known:
                raise ValueError(f"signal {name!r} cannot be handled here; use one of {', '.join(known)}")

    @property
    def numbers(self) -> set[signal.Signals]:
        """The signals to handle: submitit announces preemption by one of its own."""
        extra = slurm.submitit_signal()
        return {signal.Signals[name] for name in (*self.signals, *([extra] if extra else []))}


class Stopped(Exception):
    """The run ends here, complete up to `where`, to be continued."""

    def __init__(self, where: str):
        super().__init__(where)
        self.where = where


def world_size() -> int:
    """Processes of this run: of the group where there is one, else as the launcher says."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class StopRequest:
    """Name of the signal received, or None. `alone`: this rank works without the others from here on."""

    signal: str | None = None
    alone: bool = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name

    def stage_ended(self, stage: str) -> None:
        """Raises Stopped where a signal came and no other rank waits for this one."""
        if self.signal and (self.alone or world_size() == 1):
            raise Stopped(f"after stage {stage}")


def deaf(worker: int) -> None:
    """Block the stop signals in a process that loads data: Slurm sends them to all of a job step, and the rank needs
    its batches until it stops by itself. Workers end with their loader or their parent, by no signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


@contextmanager
def stoppable(config: Mapping[str, Any]) -> Iterator[StopRequest]:
    """Signals set the yielded request; a Stopped raised inside ends the process. `config` is the whole run's."""
    options = build(StopConfig, config["stop"], "stop")
    request = StopRequest()
    before = {number: signal.signal(number, request.handle) for number in options.numbers}
    try:
        yield request
    except Stopped as stopped:
        sys.exit(_leave(stopped, request, options, Path(config["run_dir"])))
    finally:
        ending = slurm.started_by_srun()  # a job step's process ends here, and another rank's exit would cut it short
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ending else handler or signal.SIG_DFL)


def _leave(stopped: Stopped, request: StopRequest, config: StopConfig, folder: Path) -> int:
    """Exit code of this rank. Those beside rank 0 leave with 0: a launcher kills all at the first other code."""
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return 0
    close_wandb()
    said = f"stopped by {request.signal or 'a signal to another rank'} {stopped.where}, all of it saved in {folder}"
    by_hand = f"to continue, give the same command with run_dir={folder}"
    if not config.requeue or slurm.job_id() is None:
        print(f"{said}; {by_hand}", file=sys.stderr, flush=True)
        return RESUMABLE
    print(f"{said}; job {slurm.job_id()} queues itself again and continues there", file=sys.stderr, flush=True)
    try:
        slurm.requeue()
    except slurm.RequeueError as error:
        print(f"error: {error}; {by_hand}", file=sys.stderr, flush=True)
        return RESUMABLE
    return 0


def close_wandb() -> None:
    """W&B's process writes its file to the end; a requeue would kill it first."""
    wandb = sys.modules.get("wandb")
    if wandb is None or getattr(wandb, "run", None) is None:
        return
    try:
        wandb.teardown()
    except OSError as error:  # its process got the signal too
        print(f"W&B's process ended first ({error}); its record goes on when the run does", file=sys.stderr)
