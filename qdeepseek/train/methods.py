"""The training methods of a run, one config group each: `method/compensation=cage`, `method/routing=entropy`, …

A group that is off is empty. Every other names its class (`_target_`) and that class's arguments, strictly. A class
is a Lightning callback where it acts during the fit; it may have `check(run, model)`, called with the base before
anything is trained, `attach(run, student)`, called once quantisers are in place, `optim(config)`, which changes the
optimizer's configuration, and `finish(run, student)`, called when the fit is over. One whose `unquantised` is true acts
in the unquantised stage too. Each lives in one file of qdeepseek/train/callbacks (glue) above one file of pure
arithmetic on a lower level.
"""

from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback

from qdeepseek.train.config import ConfigError, OptimConfig

# guard before precision: it runs a failed step again, at the levels at which it failed
GROUPS = ("compensation", "routing", "guard", "precision", "lora", "kv_cache")


def split(method: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `method` config as (its own keys, the groups that are on)."""
    own = {key: value for key, value in method.items() if key not in GROUPS}
    return own, {key: method[key] for key in GROUPS if method.get(key)}


def build_methods(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Group name -> object, in the order of GROUPS.

    Raises ConfigError for a group without `_target_`, an unknown key, or a value that its class refuses.
    """
    methods = {}
    for name, config in groups.items():
        if not isinstance(config, Mapping) or "_target_" not in config:
            raise ConfigError(
                f"method.{name} {config!r}: a group is chosen by name, as in method/{name}=off; see conf/method/{name}"
            )
        try:
            methods[name] = instantiate(config)
        except InstantiationException as error:
            cause = error.__cause__ or error
            raise ConfigError(f"method.{name}: {cause}") from error
    return methods


def callbacks(methods: Mapping[str, Any]) -> list[Callback]:
    """Those methods that act during a fit."""
    return [method for method in methods.values() if isinstance(method, Callback)]


def unquantised(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Those methods that the unquantised fine-tune uses too."""
    return {name: method for name, method in methods.items() if getattr(method, "unquantised", False)}


def check(methods: Mapping[str, Any], run: Any, model: Any) -> None:
    """Let every method refuse the model before anything is trained."""
    for method in methods.values():
        if hasattr(method, "check"):
            method.check(run, model)


def optim(methods: Mapping[str, Any], config: OptimConfig) -> OptimConfig:
    """The optimizer's configuration as the methods want it."""
    for method in methods.values():
        if hasattr(method, "optim"):
            config = method.optim(config)
    return config


def attach(methods: Mapping[str, Any], run: Any, student: Any) -> None:
    """Let every method see the prepared student before its optimizer is built."""
    for method in methods.values():
        if hasattr(method, "attach"):
            method.attach(run, student)


def finish(methods: Mapping[str, Any], run: Any, student: Any) -> None:
    """Let every method leave the student as it is exported, last attached first."""
    for method in reversed(list(methods.values())):
        if hasattr(method, "finish"):
            method.finish(run, student)
