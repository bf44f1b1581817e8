"""Mappings from Hydra into frozen dataclasses, strictly: an unknown key is an error that lists the known ones."""

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from safetensors import SafetensorError

from qdeepseek.data.sources import DataError
from qdeepseek.export.sources import SchemeMismatch
from qdeepseek.surgery import CoverageError

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration value that cannot work; the message names key, value, rule and remedy."""


USER_ERRORS = (
    ConfigError,
    CoverageError,
    DataError,
    SchemeMismatch,
    ValueError,
    FloatingPointError,
    OSError,
    SafetensorError,
)


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
    hints = get_type_hints(cls)
    for name, value in clean.items():
        _check_number(f"{where}: {name}", value, hints[name])
    try:
        return cls(**clean)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_number(what: str, value: Any, hint: Any) -> None:
    """A word or a fraction where a number is wanted would fail later, in a comparison that does not name it."""
    kinds = {k for k in get_args(hint) or (hint,) if k is not NoneType}
    if kinds == {int} and (isinstance(value, str) or (isinstance(value, float) and not value.is_integer())):
        raise ConfigError(f"{what} {value!r} must be a whole number")
    if kinds <= {int, float} and isinstance(value, str):
        raise ConfigError(f"{what} {value!r} must be a number")


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


@dataclasses.dataclass(frozen=True)
class MethodConfig:
    """How INT4 gets into the loop.

    start           weights QAT begins with: branch (a point of the unquantised run, so that all columns see the
                    same tokens), fp_ft (its end: qat_fraction · steps more tokens than FP_ft) or base
    qat_fraction    share of trainer.steps trained with quantisers in place
    teacher         unquantised model of the distillation: fp_ft or base
    distill_weight  w in (1 − w)·CE + w·KL
    delay_steps     steps at the start of QAT before fake-quant switches on
    cache           fake-quantise once an optimizer step; costs one copy of the quantised weights
    recompute       rebuild fake-quantised weights in the backward instead of keeping them: less memory, more time
    balance_speed   loss-free router balancing during the unquantised stages; 0 is off
    gptq_sequences  training sequences that calibrate GPTQ
    rounding        weights QAT begins with: nearest (the start's own) or gptq (GPTQ's codes and scales)
    rotate          merge orthogonal rotations into the student first (surgery/rotate.py), which spreads outliers:
                    always, never, or auto (for activations of at most 4 bits; weights alone gain nothing)
    """

    start: str = "branch"
    qat_fraction: float = 0.5
    teacher: str = "fp_ft"
    distill_weight: float = 1.0
    delay_steps: int = 0
    cache: bool = False
    recompute: bool = False
    balance_speed: float = 0.0
    gptq_sequences: int = 128
    rounding: str = "nearest"
    rotate: str = "auto"

    def __post_init__(self) -> None:
        if self.start not in ("branch", "fp_ft", "base"):
            raise ValueError(f"start {self.start!r} is unknown; use branch, fp_ft or base")
        if self.rotate not in ("auto", "always", "never"):
            raise ValueError(f"rotate {self.rotate!r} is unknown; use auto, always or never")
        if self.rounding not in ("nearest", "gptq"):
            raise ValueError(f"rounding {self.rounding!r} is unknown; use nearest or gptq")
        if self.teacher not in ("fp_ft", "base"):
            raise ValueError(f"teacher {self.teacher!r} is unknown; use fp_ft or base")
        if not 0 < self.qat_fraction <= 1:
            raise ValueError(f"qat_fraction {self.qat_fraction} must lie in (0, 1]")
        if not 0 <= self.distill_weight <= 1:
            raise ValueError(f"distill_weight {self.distill_weight} must lie in [0, 1]")
        if self.cache and self.recompute:
            raise ValueError("cache keeps fake-quantised weights and recompute drops them: set one of the two")
        if self.delay_steps < 0 or self.balance_speed < 0:
            raise ValueError("delay_steps and balance_speed must not be negative")


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Format of the export, dtype of what is not quantised (None: that of training), and bytes of a shard."""

    format: str = "compressed_tensors"
    dtype: str | None = None
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        if self.format != "compressed_tensors":
            raise ValueError(f"format {self.format!r} is unknown; use compressed_tensors")
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is unknown; use float32, bfloat16 or float16, or null")
