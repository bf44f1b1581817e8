"""Loss curves of a run from the CSV files its loggers leave: logs/STAGE/version_N/metrics.csv.

Columns named `STAGE/loss` are the training loss, `STAGE/select_loss` the loss on the select part. A resumed run
has several versions; where two logged the same step, the later one holds.
"""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """`stage` such as fp_ft or qat; `kind` train or select; equally long steps and values."""

    stage: str
    kind: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


KINDS = {"loss": "train", "train_loss": "train", "select_loss": "select", "val_loss": "select"}


def _version(file: Path) -> tuple[int, str]:
    match = re.fullmatch(r"version_(\d+)", file.parent.name)
    return (int(match[1]) if match else -1, str(file))


def _stage(prefix: str, file: Path) -> tuple[str, str | None]:
    """Stage and, where the prefix names it instead of the stage, the kind: `select/loss` of folder logs/qat."""
    if prefix in ("", "train", "select", "val"):
        folder = file.parent.parent if file.parent.name.startswith("version_") else file.parent
        return folder.name, {"select": "select", "val": "select"}.get(prefix)
    return prefix, None


def read_curves(folder: Path, first_step: Mapping[str, int] | None = None) -> list[Curve]:
    """All loss curves under `folder`. `first_step` shifts a stage that started from a step of another."""
    points: dict[tuple[str, str], dict[int, float]] = {}
    for file in sorted(folder.rglob("metrics.csv"), key=_version):
        with file.open(newline="") as stream:
            for row in csv.DictReader(stream):
                for column, text in row.items():
                    prefix, _, leaf = (column or "").rpartition("/")
                    if leaf not in KINDS or not text or not row.get("step"):
                        continue
                    stage, kind = _stage(prefix, file)
                    value = float(text)
                    if math.isfinite(value):
                        curve = points.setdefault((stage, kind or KINDS[leaf]), {})
                        curve[int(float(row["step"]))] = value
    curves = []
    for (stage, kind), values in points.items():
        shift, steps = (first_step or {}).get(stage, 0), sorted(values)
        curves.append(Curve(stage, kind, tuple(s + shift for s in steps), tuple(values[s] for s in steps)))
    return curves


def smooth(curve: Curve, span: float = 0.15) -> Curve:
    """Exponential moving average over `span` of the curve's points, corrected for its start."""
    decay = 1 - 1 / max(1.0, span * len(curve.values))
    average = weight = 0.0
    values = []
    for value in curve.values:
        average, weight = decay * average + (1 - decay) * value, decay * weight + (1 - decay)
        values.append(average / weight)
    return Curve(curve.stage, curve.kind, curve.steps, tuple(values))
