"""All ranks run one configuration: each composes its own, and one that differs would train something else unseen.

Compared before a fit by hash, one gather of 32 bytes a rank; only where hashes differ the configurations follow.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from qdeepseek.train.artifacts import flat
from qdeepseek.train.config import ConfigError


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a resolved configuration, the same for every order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _gather(value: Any, ranks: int) -> list[Any]:
    values: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(values, value)
    return values


class SameConfig(Callback):
    """Raises ConfigError on every rank where a rank's configuration is not rank 0's."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        ranks = trainer.world_size
        if ranks == 1 or len(set(_gather(config_hash(self.config), ranks))) == 1:
            return
        first, *others = _gather(flat(self.config), ranks)
        for rank, other in enumerate(others, start=1):
            keys = [key for key in sorted(first.keys() | other.keys()) if first.get(key) != other.get(key)]
            if keys:
                found = "; ".join(f"{key} {first.get(key)} and {other.get(key)}" for key in keys)
                raise ConfigError(
                    f"ranks 0 and {rank} have different configurations: {found}; give as a value what an interpolation "
                    f"makes anew in each process (a clock, an environment variable)"
                )
