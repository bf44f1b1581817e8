"""Runs of a sweep as one table: `python -m eval.report RUN … --ablation docs/results/ablation.json`.

A row is one run: its variant and seed (config.yaml), loss, KL and gap recovered of the exported model (metrics.json),
and the load of its experts in the last interval of QAT (routing.json). Differences to `base` are taken within a seed,
so that what the seeds share cancels. A step's time is compared by the process's CPU time, which other processes on the
machine do not stretch; `step_seconds` is the time on the wall.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

VARIANTS = ("base", "compensation", "compensation_relative", "compensation_row", "compensation_lsq", "cage",
            "entropy_routing", "bias_update", "precision", "distillation", "all")  # fmt: skip


def row_of(run: Path) -> dict[str, Any]:
    """One finished run. Raises ValueError for a folder that is none or was not run as a variant."""
    if not (run / "metrics.json").is_file() or not (run / "config.yaml").is_file():
        raise ValueError(f"{run} holds no metrics.json and config.yaml: give folders of finished runs")
    config: Any = OmegaConf.load(run / "config.yaml")
    if config.get("variant") is None:
        raise ValueError(f"{run} is no run of an ablation: variant is not set; choose one with variant=base and so on")
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    ((scheme, entry),) = metrics["schemes"].items()
    row = {
        "scheme": scheme, "variant": config["variant"], "seed": config["seed"],
        "loss": entry["loss"]["qat"], "delta_loss": entry["loss"]["qat"] - entry["loss"]["fp_ft"],
        "kl": entry["kl"]["qat"], "gap_recovered": entry["gap_recovered"]["loss"],
        "gap_recovered_kl": entry["gap_recovered"]["kl"], "load_entropy": None, "dead_experts": None,
        "step_seconds": metrics["seconds"]["qat"] / metrics["facts"]["steps"]["qat"],
        "step_cpu_seconds": metrics["cpu_seconds"]["qat"] / metrics["facts"]["steps"]["qat"],
        "steps": metrics["facts"]["steps"]["qat"], "evaluated_on": metrics["facts"]["evaluated_on"],
        "commit": metrics["facts"]["commit"],
    }  # fmt: skip
    if (run / "routing.json").is_file():
        last = json.loads((run / "routing.json").read_text(encoding="utf-8"))["intervals"][-1]
        row["load_entropy"] = statistics.mean(last["load_entropy_normalised"])
        row["dead_experts"] = sum(last["unused_experts"])
    return row


SWEEPS = {"w4a16_g32": "ablation", "w4a4": "ablation_w4a4"}  # scheme -> the experiment that runs it


def write_rows(runs: Iterable[Path], file: Path) -> list[dict[str, Any]]:
    """Rows of `runs`, in the order of VARIANTS, into `file`, with the commands that made them."""
    rows = [row_of(run) for run in runs]
    order = {name: i for i, name in enumerate(VARIANTS)}
    rows.sort(key=lambda r: (r["scheme"], order.get(r["variant"], len(order)), r["variant"], r["seed"]))
    commits = sorted({r["commit"] for r in rows})
    command = "; ".join(
        f"python train.py --multirun experiment={SWEEPS.get(s, 'ablation quant=' + s)}"
        for s in dict.fromkeys(r["scheme"] for r in rows)
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"command": command, "commit": ", ".join(commits), "rows": rows}, indent=1) + "\n")
    return rows


def mean_se(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (nan for one value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def shown(values: Sequence[float | None], form: str) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    mean, error = mean_se(known)
    return f"{mean:{form}}" if math.isnan(error) else f"{mean:{form}} ± {error:{form.lstrip('+')}}"


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Cells by scheme and variant: means ± standard errors over seeds; step time against base of the same seed."""
    lines = []
    for scheme in dict.fromkeys(r["scheme"] for r in rows):
        base = {r["seed"]: r for r in rows if (r["scheme"], r["variant"]) == (scheme, "base")}
        for variant in dict.fromkeys(r["variant"] for r in rows if r["scheme"] == scheme):
            own = [r for r in rows if (r["scheme"], r["variant"]) == (scheme, variant)]
            paired = [(r, base[r["seed"]]) for r in own if r["seed"] in base]
            lines.append([
                scheme, variant, str(len(own)),
                shown([r["delta_loss"] for r in own], "+.4f"),
                "" if variant == "base" else shown([r["loss"] - b["loss"] for r, b in paired], "+.4f"),
                shown([r["kl"] for r in own], ".4f"),
                "" if variant == "base" else shown([r["kl"] - b["kl"] for r, b in paired], "+.4f"),
                shown([r["gap_recovered"] for r in own], ".0%"),
                shown([r["load_entropy"] for r in own], ".3f"),
                shown([r["dead_experts"] for r in own], ".1f"),
                "" if variant == "base" else shown(
                    [r["step_cpu_seconds"] / b["step_cpu_seconds"] for r, b in paired], ".2f"
                ),
            ])  # fmt: skip
    return lines


HEAD = ["scheme", "variant", "seeds", "Δ loss to FP_ft", "loss − base", "KL to FP_ft", "KL − base", "gap recovered",
        "load entropy", "experts without a token", "CPU time of a step / base"]  # fmt: skip
