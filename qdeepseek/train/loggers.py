"""CSV and W&B loggers from the `logger` config group.

CSV keeps one file per stage and attempt, logs/<stage>/version_<n>/metrics.csv, so a resumed run never deletes
what an earlier attempt wrote. W&B keeps one run for all stages and attempts: its id lies in wandb_id.txt. A run that an
exception ends is marked as failed there, with the reason in its summary.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from qdeepseek.train.config import ConfigError
from qdeepseek.train.provenance import git_commit
from qdeepseek.train.stop import Stopped, StopRequest
from qdeepseek.train.wandb_logger import StoppableWandb

STEPS_APART = 10_000_000  # rows that an offline attempt may log
FLUSH = "x_transaction_log_flush_interval"  # seconds between writes of W&B's file, 15 by itself; none before 0.30


@dataclass(frozen=True)
class LoggerConfig:
    """`kind` csv or wandb (which also writes the CSV files).

    layers_every    optimizer steps between two looks at gradients, scales and codes by layer; 0 never looks
    peak_tflops     peak of one device in 1e12 FLOP/s, against which MFU is; None: by the device's name
    The other keys are W&B's own; `group` of a sweep's jobs is by default the name of its folder.
    """

    kind: str = "csv"
    layers_every: int = 50
    peak_tflops: float | None = None
    project: str = "qdeepseek"
    entity: str | None = None
    group: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("csv", "wandb"):
            raise ValueError(f"kind {self.kind!r} is unknown; use csv or wandb")
        if self.layers_every < 0:
            raise ValueError(f"layers_every {self.layers_every} must not be negative; 0 is off")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise ValueError(f"peak_tflops {self.peak_tflops} must be positive; null takes it from the device's name")


def csv_logger(folder: Path, stage: str) -> CSVLogger:
    """Logger of one stage; every attempt gets the next version."""
    return CSVLogger(folder / "logs", name=stage, flush_logs_every_n_steps=50)


def run_id(folder: Path) -> str | None:
    """W&B's id of the run in this folder, that of its first attempt; an agent of a W&B sweep gives it. Rank 0 alone."""
    if getattr(rank_zero_only, "rank", 0):
        return None
    file = folder / "wandb_id.txt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text((os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)) + "\n")
    return file.read_text().strip()


def wandb_logger(
    config: LoggerConfig, folder: Path, run_config: dict[str, Any], stop: StopRequest | None = None
) -> WandbLogger | None:
    """The run's W&B logger, or None for kind csv. A resumed folder continues the run it began.

    Raises ConfigError where wandb is not installed.
    """
    if config.kind == "csv":
        return None
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("logger.kind wandb: wandb is not installed; pip install 'qdeepseek[wandb]'") from error
    # a signal to the job ends W&B's process at once, and what it has not written is lost
    flush: dict[str, Any] = {FLUSH: 1.0} if FLUSH in wandb.Settings.model_fields else {}
    logger = StoppableWandb(
        stop or StopRequest(), id=run_id(folder), name=folder.name, save_dir=folder, project=config.project,
        entity=config.entity, group=config.group, job_type=run_config.get("job"), offline=config.offline,
        resume="allow", settings=wandb.Settings(**flush),
    )  # fmt: skip
    earlier = len(list(folder.glob("wandb/*run-*-*"))) if config.offline else 0
    logger.log_hyperparams({**run_config, "commit": git_commit()})
    _begin(logger, earlier)
    return logger


@rank_zero_only
def _begin(logger: WandbLogger, earlier: int) -> None:
    """Number the attempt. `wandb sync` appends rising steps alone; offline, nobody knows where the last one ended."""
    logger.experiment.log({"attempt": earlier}, **({"step": earlier * STEPS_APART} if earlier else {}))


def loggers(folder: Path, stage: str, wandb: WandbLogger | None) -> list[Logger]:
    """All loggers of one stage."""
    return [csv_logger(folder, stage), *([wandb] if wandb is not None else [])]


@contextmanager
def wandb_closed() -> Iterator[None]:
    """End this process's W&B run with the block: finished, or failed where an exception or an exit status leaves it.

    Jobs of a sweep may share a process, and a run left open would take up the next job's numbers.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        wandb = sys.modules.get("wandb")
        stopped = isinstance(failure, Stopped)  # stop.py closes it, and the run goes on later
        if wandb is not None and getattr(wandb, "run", None) is not None and not stopped:
            good = failure is None or (isinstance(failure, SystemExit) and failure.code in (None, 0))
            if not good:
                wandb.run.summary["failure"] = f"{type(failure).__name__}: {failure}"
            wandb.finish(exit_code=0 if good else 1)
