"""CSV and W&B loggers from the `logger` config group."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from qdeepseek.train.config import ConfigError


def build_logger(config: Mapping[str, Any], folder: Path) -> Logger:
    """`csv` writes folder/metrics.csv."""
    if config["kind"] == "csv":
        return CSVLogger(folder, name="", version="", flush_logs_every_n_steps=50)
    raise ConfigError(f"logger.kind {config['kind']!r} is unknown; use csv or wandb")
