"""Mappings from Hydra into frozen dataclasses, strictly: an unknown key is an error that lists the known ones."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration value that cannot work; the message names key, value, rule and remedy."""


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Construct dataclass `cls` from `values`; `where` is the config group named in errors.

    Raises ConfigError on an unknown or missing key, or with the dataclass' own complaint about a value.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(f"{where}: unknown key {', '.join(unknown)}; known keys are {', '.join(fields)}")
    required = [n for n, f in fields.items()
                if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]  # fmt: skip
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{where}: key {', '.join(missing)} is missing")
    clean = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    try:
        return cls(**clean)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule. `scale_lr` is the peak learning rate of learned quantisation scales."""

    lr: float
    scale_lr: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 10
    schedule: str = "cosine"  # cosine | linear | wsd (constant, then linear over `decay_fraction`) | constant
    decay_fraction: float = 0.3
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.scale_lr < 0:
            raise ValueError(f"lr {self.lr} must be positive and scale_lr {self.scale_lr} not negative")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction {self.decay_fraction} must lie in (0, 1]")


SCHEDULES = ("cosine", "linear", "wsd", "constant")
