"""`strategy=…` of a run: what is parsed before anything is loaded, and the object that each fit gets.

auto, ddp                          Lightning's own
zero1, zero2, zero3, zero3_offload DeepSpeed (zero.py)
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import Strategy

from qdeepseek.train.config import ConfigError, build
from qdeepseek.train.zero import Zero, ZeroConfig, deepspeed_config, import_deepspeed

Parsed = str | ZeroConfig


def parse(config: Mapping[str, Any]) -> Parsed:
    """Lightning's name, or the settings of ZeRO. Raises ConfigError for what cannot work with this configuration.

    Learned scales get no gradient while fake-quant waits, which DDP must know.
    """
    group = config["strategy"]
    if "stage" not in group:
        unknown = sorted(set(group) - {"name"})
        if unknown:
            raise ConfigError(f"strategy: unknown key {', '.join(unknown)}; {group['name']} has none but name")
        name = str(group["name"])
        return "ddp_find_unused_parameters_true" if name == "ddp" and config["method"].get("delay_steps") else name
    zero = zero_config(config)
    import_deepspeed()
    return zero


def zero_config(config: Mapping[str, Any]) -> ZeroConfig:
    """Settings of ZeRO. Raises ConfigError for those, and for a precision, that it cannot train with."""
    zero = build(ZeroConfig, config["strategy"], "strategy")
    deepspeed_config(zero, str(config["trainer"]["precision"]))
    dtype = config["model"].get("dtype", "float32")
    if dtype != "float32":
        raise ConfigError(
            f"model.dtype {dtype} with strategy {zero.name}: weights are trained in fp32, which is also their master "
            f"copy; set model.dtype=float32 and trainer.precision=bf16-mixed (export.dtype says what is served)"
        )
    return zero


def make(parsed: Parsed, precision: str) -> Strategy | str:
    """A strategy for one fit; Lightning's do not serve two."""
    return Zero(parsed, precision) if isinstance(parsed, ZeroConfig) else parsed
