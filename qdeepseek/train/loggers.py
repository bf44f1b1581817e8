"""CSV and W&B loggers from the `logger` config group.

CSV keeps one file per stage and attempt, logs/<stage>/version_<n>/metrics.csv, so a resumed run never deletes
what an earlier attempt wrote. W&B keeps one run for all stages and attempts: its id lies in wandb_id.txt.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from qdeepseek.train.config import ConfigError


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


def wandb_logger(config: LoggerConfig, folder: Path, run_config: dict[str, Any]) -> WandbLogger | None:
    """The run's W&B logger, or None for kind csv. A resumed folder continues the run it began.

    Raises ConfigError where wandb is not installed.
    """
    if config.kind == "csv":
        return None
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise ConfigError("logger.kind wandb: wandb is not installed; pip install 'qdeepseek[wandb]'") from error
    id_file = folder / "wandb_id.txt"
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4) + "\n")
    logger = WandbLogger(
        id=id_file.read_text().strip(), name=folder.name, save_dir=folder, project=config.project,
        entity=config.entity, group=config.group, offline=config.offline, resume="allow",
    )  # fmt: skip
    logger.log_hyperparams(run_config)
    return logger


def loggers(folder: Path, stage: str, wandb: WandbLogger | None) -> list[Logger]:
    """All loggers of one stage."""
    return [csv_logger(folder, stage), *([wandb] if wandb is not None else [])]
