"""CSV and W&B loggers from the `logger` config group.

CSV keeps one file per stage and attempt, logs/<stage>/version_<n>/metrics.csv, so a resumed run never deletes
what an earlier attempt wrote. W&B keeps one run for all stages and attempts: its id lies in wandb_id.txt.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from qdeepseek.train.config import ConfigError
from qdeepseek.train.stop import StopRequest
from qdeepseek.train.wandb_logger import StoppableWandb


@dataclass(frozen=True)
class LoggerConfig:
    """`kind` csv or wandb (which also writes the CSV files); the other keys are W&B's own."""

    kind: str = "csv"
    project: str = "qdeepseek"
    entity: str | None = None
    group: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("csv", "wandb"):
            raise ValueError(f"kind {self.kind!r} is unknown; use csv or wandb")


def csv_logger(folder: Path, stage: str) -> CSVLogger:
    """Logger of one stage; every attempt gets the next version."""
    return CSVLogger(folder / "logs", name=stage, flush_logs_every_n_steps=50)


@rank_zero_only
def wandb_id(folder: Path) -> str:
    """The run's W&B id, made on its first start; rank 0 alone records, and ranks of a job start at the same moment."""
    file = folder / "wandb_id.txt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4) + "\n")
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
        import wandb  # noqa: F401
    except ImportError as error:
        raise ConfigError("logger.kind wandb: wandb is not installed; pip install 'qdeepseek[wandb]'") from error
    logger = StoppableWandb(
        stop or StopRequest(), id=wandb_id(folder), name=folder.name, save_dir=folder, project=config.project,
        entity=config.entity, group=config.group, offline=config.offline, resume="allow",
    )  # fmt: skip
    logger.log_hyperparams(run_config)
    return logger


def loggers(folder: Path, stage: str, wandb: WandbLogger | None) -> list[Logger]:
    """All loggers of one stage."""
    return [csv_logger(folder, stage), *([wandb] if wandb is not None else [])]
