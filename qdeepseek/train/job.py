"""A job of Hydra's as the program sees it: one resolved configuration, one folder, in a sweep one W&B group."""

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf


def job_config(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration of this process.

    `run_dir` is the folder that Hydra made for the job, the same on all its ranks and after a requeue. The runs of a
    sweep share `logger.group`, the last two parts of the sweep's folder, unless it is given.
    """
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    hydra = HydraConfig.get()
    config["run_dir"] = hydra.runtime.output_dir
    if hydra.mode == RunMode.MULTIRUN and config["logger"].get("group", "") is None:
        config["logger"]["group"] = "/".join(Path(hydra.sweep.dir).parts[-2:])
    return config
