"""What a run leaves behind besides its models: the resolved config and the coverage.

A folder belongs to one configuration. Continuing it with another one would mix two runs in one report, so
that is refused, key by key; what only changes where and how long a run works may differ: the ranks too, as long as all
of them together read as many sequences a micro-batch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import OmegaConf

from qdeepseek.surgery import Coverage
from qdeepseek.train.config import ConfigError

MAY_DIFFER = (
    "run_dir",
    "name",
    "logger",
    "strategy",
    "stop",
    "trainer.threads",
    "trainer.devices",
    "trainer.nodes",
    "trainer.accelerator",
    "trainer.checkpoint_every",
)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raises ConfigError listing every key in which a continued run differs from its beginning."""
    old, new = flat(before), flat(now)
    if "ranks" in old and old["ranks"] * old["data.batch_size"] == new.get("ranks", 0) * new["data.batch_size"]:
        old |= {key: new[key] for key in ("ranks", "data.batch_size")}
    changed = [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(key == m or key.startswith(f"{m}.") for m in MAY_DIFFER)
    ]
    if changed:
        raise ConfigError(
            f"folder {folder} was begun with another configuration: {'; '.join(changed)}; give the same values to "
            f"continue it, or another folder"
        )


@rank_zero_only
def open_folder(folder: Path, config: Mapping[str, Any], coverage: Coverage, ranks: int) -> None:
    """Create the run's folder with config.yaml and coverage.json, or check that it is this run's.

    ranks: processes of this run, which no key of the configuration says; kept in config.yaml beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, file = {**config, "ranks": ranks}, folder / "config.yaml"
    if file.exists():
        before: Any = OmegaConf.to_container(OmegaConf.load(file))
        check_same(before, config, folder)
    else:
        OmegaConf.save(OmegaConf.create(dict(config)), file)
    write_coverage(folder, coverage)


def write_coverage(folder: Path, coverage: Coverage) -> None:
    """coverage.json: at the start what the recipe plans, at the end what is exported."""
    (folder / "coverage.json").write_text(json.dumps(coverage.to_dict(), indent=1) + "\n")
