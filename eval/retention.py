"""How much of the fine-tuned model survives INT4: the columns base, FP_ft, RTN, GPTQ, QAT on the same tokens.

FP_ft, the unquantised model fine-tuned on the same tokens, is the teacher of every KL and agreement and the
ceiling of the gap recovered; the untuned base is shown but never a reference. Everything ends up in
`metrics.json` under stable keys:

    {"schemes": {NAME: {"loss": {COLUMN: x}, "kl": …, "agreement": …, "perplexity": …, "accuracy": …,
                        "gap_recovered": {"loss", "kl"}, "ci95": {the same, with [low, high]},
                        "bits_per_weight", "bytes", …}},
     "coverage": {…}, "seconds": {…}, "cpu_seconds": {…}, "layers": {…}, "facts": {…}}
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from eval.bootstrap import Array, Estimate, estimate, gap_recovered, resampled_means
from eval.size import Size
from eval.token_metrics import TokenMetrics, token_metrics

COLUMNS = ("base", "fp_ft", "rtn", "gptq", "qat")
MEASURES = ("loss", "kl", "agreement", "accuracy")
FIELDS = {"loss": "nll_U", "kl": "kl_U", "agreement": "agree_U", "accuracy": "correct_U"}


@dataclass(frozen=True)
class Column:
    """One model of the comparison; `name` is one of COLUMNS, or another name for a peer method."""

    name: str
    model: PreTrainedModel


def evaluate_columns(
    columns: Sequence[Column], batches: Iterable[Mapping[str, Tensor]], *, max_logits: int = 2**25
) -> dict[str, TokenMetrics]:
    """Score all columns in one pass with column `fp_ft` as the teacher. Raises ValueError without it."""
    models = {column.name: column.model for column in columns}
    if "fp_ft" not in models:
        raise ValueError(
            f"columns {', '.join(models)} lack fp_ft, the unquantised fine-tuned model; retention and gap "
            f"recovered are defined against it alone"
        )
    return token_metrics(models, batches, teacher=models["fp_ft"], max_logits=max_logits)


@dataclass(frozen=True)
class Retention:
    """Columns of one scheme and everything derived from them.

    Args:
        scheme: name of the recipe, such as `w4a16_g32`.
        metrics: column name -> sums per unit; must hold `fp_ft`, on the same units for all columns.
        size: of the exported folder; `full_size` of FP_ft's folder in whatever dtype it was saved.
        resamples, seed: of the bootstrap.
    """

    scheme: str
    metrics: Mapping[str, TokenMetrics]
    size: Size | None = None
    full_size: Size | None = None
    resamples: int = 2000
    seed: int = 0
    _means: dict[str, dict[str, tuple[float, Array]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        reference = self.metrics["fp_ft"]
        for name, m in self.metrics.items():
            same = m.ids_U.equal(reference.ids_U) and m.tokens_U.equal(reference.tokens_U)
            if not same or m.kl_U is None:
                raise ValueError(
                    f"column {name} was scored on other tokens than fp_ft, or without it as teacher; "
                    f"evaluate all columns on the same batches"
                )
        object.__setattr__(self, "_means", {measure: self._resample(measure) for measure in MEASURES})

    @property
    def units(self) -> int:
        return len(self.metrics["fp_ft"].ids_U)

    def _resample(self, measure: str) -> dict[str, tuple[float, Array]]:
        """Column -> (mean, resamples (R,)), the same draws for all columns and measures."""
        sums = np.stack([getattr(m, FIELDS[measure]).numpy() for m in self.metrics.values()])
        counts = self.metrics["fp_ft"].tokens_U.numpy()
        draws = resampled_means(sums, counts, resamples=self.resamples, seed=self.seed)
        return {name: (float(sums[k].sum() / counts.sum()), draws[k]) for k, name in enumerate(self.metrics)}

    def _estimate(self, value: float, draws: Array) -> Estimate:
        return estimate(value, draws) if self.units > 1 else Estimate(value, reason="one unit: no interval")

    def measure(self, measure: str, column: str) -> Estimate:
        """Mean of one of loss, kl, agreement, accuracy with its interval; absent for a missing column."""
        if column not in self.metrics:
            return Estimate(None, reason=f"column {column} was not run")
        return self._estimate(*self._means[measure][column])

    def difference(self, measure: str, column: str, to: str = "fp_ft") -> Estimate:
        """Paired difference column − to."""
        if column not in self.metrics or to not in self.metrics:
            return Estimate(None, reason=f"column {column} or {to} was not run")
        (a, a_R), (b, b_R) = self._means[measure][column], self._means[measure][to]
        return self._estimate(a - b, a_R - b_R)

    def gap(self, measure: str, column: str = "qat") -> Estimate:
        """Gap recovered by a column, in `loss` or in `kl` to FP_ft."""
        if column not in self.metrics or "rtn" not in self.metrics:
            return Estimate(None, reason=f"column {column} or rtn was not run")
        if self.units < 2:
            return Estimate(None, reason="one held-out unit gives no interval; use more documents")
        means = self._means[measure]
        return gap_recovered(means["rtn"], means["fp_ft"], means[column])

    def to_dict(self) -> dict[str, Any]:
        """The entry of `metrics.json` under `schemes`."""
        names = list(dict.fromkeys([*COLUMNS, *self.metrics]))
        found = {m: {n: self.measure(m, n) for n in names} for m in MEASURES}
        found["delta_loss"] = {n: self.difference("loss", n) for n in names}
        for name in names:
            if name not in ("base", "fp_ft", "rtn", "qat"):
                found[f"qat_minus_{name}"] = {m: self.difference(m, "qat", name) for m in ("loss", "kl")}
        trained = [n for n in names if n not in ("base", "fp_ft", "rtn")]
        gaps = {n: {m: self.gap(m, n) for m in ("loss", "kl")} for n in trained}
        found["gap_recovered"] = gaps["qat"]
        entry: dict[str, Any] = {key: {n: e.value for n, e in group.items()} for key, group in found.items()}
        entry["ci95"] = {key: {n: e.interval for n, e in group.items()} for key, group in found.items()}
        entry["perplexity"] = {n: _exp(v) for n, v in entry["loss"].items()}
        bounds = entry["ci95"]["loss"].items()
        entry["ci95"]["perplexity"] = {n: i and [_exp(i[0]), _exp(i[1])] for n, i in bounds}
        by_column = {n: {m: e.interval for m, e in g.items()} for n, g in gaps.items()}
        entry["gap_recovered_by"] = {n: {m: e.value for m, e in g.items()} for n, g in gaps.items()}
        entry["ci95"]["gap_recovered_by"] = by_column
        entry["gap_recovered_reason"] = {m: e.reason for m, e in gaps["qat"].items()}
        entry["bits_per_weight"] = self.size.bits_per_weight if self.size else None
        entry["bytes"] = self.size.bytes if self.size else None
        entry["bytes_full"] = self.full_size.bytes if self.full_size else None
        entry["bytes_bf16"] = 2 * self.full_size.parameters if self.full_size else None
        entry["bits_per_parameter"] = self.size.bits_per_parameter if self.size else None
        reference = self.metrics["fp_ft"]
        entry["held_out"] = {"tokens": reference.tokens, "units": self.units, "unit": reference.unit,
                             "resamples": self.resamples, "seed": self.seed}  # fmt: skip
        return entry


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(min(value, 700.0))


def run_metrics(
    retentions: Sequence[Retention],
    *,
    coverage: Mapping[str, Any] | None = None,
    seconds: Mapping[str, float] | None = None,
    cpu_seconds: Mapping[str, float] | None = None,
    layers: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Contents of `metrics.json`; `layers`: scheme -> {"weights" | "hidden": {column: ErrorMap.to_dict()}}."""
    return {
        "schemes": {r.scheme: r.to_dict() for r in retentions},
        "coverage": dict(coverage or {}),
        "seconds": dict(seconds or {}),
        "cpu_seconds": dict(cpu_seconds or {}),
        "layers": dict(layers or {}),
        "facts": dict(facts or {}),
    }


def write_metrics(file: Path, metrics: Mapping[str, Any]) -> None:
    """Write strict JSON (no NaN), replacing the file in one step."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(json.dumps(metrics, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, file)
