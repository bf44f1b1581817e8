"""One unquantised run for many: FP_ft and its branch point in a folder that all jobs of a sweep share.

What differs between the runs of a comparison is how they quantise; the unquantised columns are the same, and computing
them once is both cheaper and the fairer comparison. `unquantised_dir: null` keeps them in the run's own folder. The
first job that needs them computes them under a file lock, the others wait and read; a folder made with other settings
is refused.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qdeepseek.train.artifacts import check_same
from qdeepseek.train.config import ConfigError, build
from qdeepseek.train.run import TrainerConfig, ranks_of

GROUPS = ("seed", "model", "data", "optim", "trainer")
METHOD_KEYS = ("qat_fraction", "balance_speed", "lora")


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's configuration that its unquantised stage depends on."""
    method = {key: config["method"][key] for key in METHOD_KEYS if config["method"].get(key)}
    if method.get("lora", {}).get("stages") == "qat":  # then adapters are no part of it
        del method["lora"]
    ranks = ranks_of(build(TrainerConfig, config["trainer"], "trainer"))
    return {**{key: config[key] for key in GROUPS}, "method": method, "ranks": ranks}


def folder_of(config: Mapping[str, Any]) -> Path:
    return Path(config.get("unquantised_dir") or config["run_dir"])


@contextmanager
def claimed(config: Mapping[str, Any]) -> Iterator[Path]:
    """The folder, for this job alone while it is shared and incomplete.

    Raises ConfigError where it belongs to other settings, and where several processes would have to make it together.
    """
    folder = folder_of(config)
    if folder == Path(config["run_dir"]):
        yield folder
        return
    folder.mkdir(parents=True, exist_ok=True)
    complete = (folder / "fp_ft" / "config.json").exists()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not complete:
        raise ConfigError(
            f"unquantised_dir {folder} holds no fp_ft yet, and several processes cannot share the lock that makes it; "
            f"run one job with one process first, or set unquantised_dir=null"
        )
    file = folder / "unquantised.yaml"
    with open(folder / ".lock", "w") as lock:
        if not complete:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            before: Any = OmegaConf.to_container(OmegaConf.load(file))
            check_same(before, settings(config), folder)
        else:
            OmegaConf.save(OmegaConf.create(settings(config)), file)
        yield folder
