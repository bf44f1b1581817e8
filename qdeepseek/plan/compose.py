"""From `key=value` words to a configuration: Hydra composes conf/plan.yaml as train.py composes conf/train.yaml."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qdeepseek.train.config import ConfigError


def conf_folder(given: Path | None = None) -> Path:
    """The configuration folder: the given one, ./conf, or that of the source tree. Raises ConfigError."""
    candidates = [given] if given else [Path("conf"), Path(__file__).parents[2] / "conf"]
    for folder in candidates:
        if (folder / "plan.yaml").is_file():
            return folder.resolve()
    raise ConfigError(f"{candidates[-1]}: no plan.yaml in it; run in the project's folder, or give --conf FOLDER")


def configuration(words: Sequence[str], folder: Path | None = None) -> tuple[dict[str, Any], str]:
    """The composed configuration and the name of its strategy.

    Raises ConfigError for an unknown name, key or word, naming what there is.
    """
    conf = conf_folder(folder)
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is no key=value, such as model=deepseek_v3 or nodes=4")
    for word in words:
        _check_choice(word, conf)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            cfg = compose("plan", [*words, "run_dir=plan"], return_hydra_config=True)
        chosen = str(cfg.hydra.runtime.choices["strategy"])
        cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        config: Any = OmegaConf.to_container(cfg, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error
    return config, chosen


def _one_line(error: Exception) -> str:
    """Hydra's complaint; without its advice to append an unknown key with `+`, which no plan would read."""
    what, *advice = str(error).strip().splitlines()
    if what.startswith("Could not override"):
        return f"{what.rstrip('.')}: no such key; there are nodes, gpus, tp, length, hardware.KEY and those of train.py"
    return " ".join([what, *advice])


def _check_choice(word: str, conf: Path) -> None:
    """`group=name` must be a file of that group."""
    group, _, name = word.partition("=")
    folder = conf / group.partition("@")[0]
    if not re.fullmatch(r"[\w/@]+", group) or not folder.is_dir():
        return
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name.strip("'\"") not in (*known, "null"):
        raise ConfigError(f"{group}={name}: no such choice; {group} is one of {', '.join(known)}")
