"""What W&B keeps of a run besides its curves: coverage as it begins; tables, figures and the export as it ends.

Figures are SVG, which W&B shows as HTML pages without a library that could draw them as pixels. The export is a
reference: W&B keeps its path, sizes and nothing of its weights.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from qdeepseek.surgery import Coverage
from qdeepseek.train.events import read_events

COVERAGE = ("part", "module_class", "scheme", "parameters", "share")
MEASURES = ("loss", "delta_loss", "kl", "agreement", "accuracy")
INTERVALS = ("delta_loss", "kl")
PRECISION = ("step", "group", "from", "to", "statistic", "reason")
GUARD = ("step", "quantity", "module", "where", "what", "rank", "raised", "action")


@rank_zero_only
def log_start(logger: WandbLogger | None, coverage: Coverage) -> None:
    """The coverage table, before anything is trained."""
    if logger is not None:
        _log_coverage(logger.experiment, coverage.to_dict())


@rank_zero_only
def log_end(
    logger: WandbLogger | None, folder: Path, coverage: Coverage, metrics: Mapping[str, Any] | None = None
) -> None:
    """Coverage as exported, events, a reference to the export, and what an evaluation left; ends the run.

    metrics: as in metrics.json; None for a run that is not evaluated, which has neither table nor report.
    """
    if logger is None:
        return
    import wandb

    run: Any = logger.experiment
    _log_coverage(run, coverage.to_dict())
    _log_events(run, "precision/events", PRECISION, read_events(folder, "precision"))
    _log_events(run, "guard/events", GUARD, guard_events(folder))
    if metrics is not None:
        _log_report(run, folder / "report", metrics)
    artifact = wandb.Artifact(f"export-{run.id}", type="model")
    artifact.add_reference((folder / "export").absolute().as_uri(), checksum=False)
    run.log_artifact(artifact)
    wandb.finish()


def _log_report(run: Any, report: Path, metrics: Mapping[str, Any]) -> None:
    import wandb

    for scheme, entry in metrics["schemes"].items():
        columns, rows = report_rows(entry)
        run.log({f"report/{scheme}": wandb.Table(columns=columns, data=rows)})
        for measure, value in entry["gap_recovered"].items():
            run.summary[f"gap_recovered/{scheme}/{measure}"] = value
    for figure in sorted((report / "figures").glob("*.svg")):
        page = figure_page(figure.stem, figure.read_text(encoding="utf-8"))
        run.log({f"figures/{figure.stem}": wandb.Html(page, inject=False)})
    text = (report / "report.html").read_text(encoding="utf-8")
    run.log({"report/page": wandb.Html(text, inject=False)})


def report_rows(entry: Mapping[str, Any]) -> tuple[list[str | int], list[list[Any]]]:
    """Head and rows of the final table, a row a model; intervals of 95 %."""
    bounds = [f"{m}_{side}" for m in INTERVALS for side in ("low", "high")]
    rows = []
    for column in entry["loss"]:
        ends = [end for m in INTERVALS for end in entry["ci95"][m].get(column) or (None, None)]
        rows.append([column, *(entry[m].get(column) for m in MEASURES), *ends])
    return ["model", *MEASURES, *bounds], rows


def guard_events(folder: Path) -> list[dict[str, Any]]:
    """Failed steps that the guard reported, in order."""
    file = folder / "guard.json"
    return json.loads(file.read_text(encoding="utf-8"))["events"] if file.is_file() else []


def figure_page(title: str, svg: str) -> str:
    """A page of its own for a figure: its encoding, no margin, no wider than it can be read."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
        f'<body style="margin:0"><div style="max-width:760px;margin:auto">{svg}</div></body></html>'
    )


def _log_coverage(run: Any, coverage: Mapping[str, Any]) -> None:
    import wandb

    rows = [[row[c] for c in COVERAGE] for row in coverage["rows"]]
    run.log({"coverage": wandb.Table(columns=list(COVERAGE), data=rows)})
    for name in ("quantized_share", "expert_share"):
        run.summary[f"coverage/{name}"] = coverage[name]


def _log_events(run: Any, name: str, columns: Sequence[str], events: Iterable[Mapping[str, Any]]) -> None:
    import wandb

    rows = [[event.get(c) for c in columns] for event in events]
    if rows:
        run.log({name: wandb.Table(columns=list(columns), data=rows)})
