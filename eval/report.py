"""The report of a run, `python -m eval.report RUN_DIR…`: Markdown and one HTML page from the files of its folder.

Reads metrics.json (eval/retention.py), and where they exist coverage.json, config.yaml, routing.json, events.jsonl and
the loggers' metrics.csv; writes report/report.html, report/report.md and report/figures/*.svg.
Nothing is computed here that is not in those files, so a report can be drawn again at any time.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval import ablation, page, words
from eval.curves import Curve, read_curves
from eval.error_map import ErrorMap
from eval.figures import Bar, bars, curves, heat_map, level_map, standalone
from eval.level_map import LevelMap, read_level_map
from eval.load_map import LoadMap, load_map


@dataclass(frozen=True)
class Figure:
    """A drawn figure: file stem, heading, caption, SVG."""

    name: str
    heading: str
    caption: str
    svg: str
    tall: bool = False  # stands beside two others


@dataclass(frozen=True)
class Report:
    """Everything a report shows. `metrics` as in metrics.json; `config` is the resolved YAML as text."""

    metrics: Mapping[str, Any]
    config: str = ""
    curves: Sequence[Curve] = field(default_factory=tuple)
    routing: LoadMap | None = None
    levels: LevelMap | None = None

    @classmethod
    def from_folder(cls, run: Path) -> "Report":
        """Raises FileNotFoundError where the folder is no finished run."""
        file = run / "metrics.json"
        if not file.is_file():
            raise FileNotFoundError(f"{run}: no metrics.json; give the folder of a finished run (outputs/…)")
        metrics = json.loads(file.read_text(encoding="utf-8"))
        coverage, config = run / "coverage.json", run / "config.yaml"
        if not metrics.get("coverage") and coverage.is_file():
            metrics["coverage"] = json.loads(coverage.read_text(encoding="utf-8"))
        text = config.read_text(encoding="utf-8") if config.is_file() else ""
        begun, steps = first_steps(metrics.get("facts", {})), metrics.get("facts", {}).get("steps", {})
        levels = read_level_map(run, steps.get("qat"), begun.get("qat", 0))
        return cls(metrics, text, read_curves(run, begun), LoadMap.from_folder(run), levels)

    @property
    def part(self) -> str:
        """The held-out part that was scored."""
        return str(self.metrics.get("facts", {}).get("evaluated_on", "report"))

    @property
    def schemes(self) -> Mapping[str, words.Entry]:
        return self.metrics["schemes"]

    @property
    def first(self) -> tuple[str, words.Entry]:
        return next(iter(self.schemes.items()))


def first_steps(facts: Mapping[str, Any]) -> dict[str, int]:
    """Step of the whole run at which QAT began: 0 from the base, else the step its starting point was saved."""
    steps = facts.get("steps")
    if not isinstance(steps, Mapping) or "qat" not in steps or "fp_ft" not in steps:
        return {}
    begun = {"branch": steps["fp_ft"] - steps["qat"], "fp_ft": steps["fp_ft"]}
    return {"qat": begun.get(str(steps.get("qat_starts_from")), 0)}


def retention_figures(scheme: str, entry: words.Entry) -> list[Figure]:
    """Distance of every quantised column to FP_ft: in loss, in KL, and in predicted tokens."""
    shown = [c for c in words.columns_of(entry) if c not in ("base", "fp_ft")]
    ci = entry["ci95"]
    loss = [Bar(c, v, ci["delta_loss"][c], words.number(v, 4, True)) for c in shown
            if (v := entry["delta_loss"][c]) is not None]  # fmt: skip
    kl = [Bar(c, v, ci["kl"][c], words.number(v)) for c in shown if (v := entry["kl"][c]) is not None]
    found = []
    if loss:
        title = "Loss above the unquantised model"
        found.append(Figure(f"{scheme}_loss", title, "nats a token, lower is better; whiskers are 95 % intervals",
                            bars(title, loss, "nats a token")))  # fmt: skip
    if kl:
        title = "KL divergence from the unquantised model"
        found.append(Figure(f"{scheme}_kl", title, "nats a token, lower is better; whiskers are 95 % intervals",
                            bars(title, kl, "nats a token")))  # fmt: skip
    return found


def layer_figures(scheme: str, layers: Mapping[str, Any]) -> list[Figure]:
    """Heat maps of relative errors: hidden states and weights."""
    texts = {
        "weights": ("Error of weights", "served weight against FP_ft's, in percent; layers across"),
        "hidden": ("Error of hidden states", "against FP_ft on held-out text, in percent; layers across"),
    }
    found = []
    for kind, (title, caption) in texts.items():
        maps = [(column, ErrorMap.from_dict(m)) for column, m in layers.get(kind, {}).items()]
        maps = [(column, m) for column, m in maps if m.layers and m.parts]
        if maps:
            figure = heat_map(title, maps)
            found.append(Figure(f"{scheme}_{kind}", title, caption, figure, tall=kind == "weights"))
    return found


def curve_figures(found: Sequence[Curve]) -> list[Figure]:
    """One figure of all stages' losses."""
    drawn = [c for c in found if len(c.values) > 1]
    if not drawn:
        return []
    caption = "nats a token; thin: training batches, smoothed; with dots: select part"
    return [Figure("curves", "Loss while training", caption, curves("Loss while training", drawn))]


def routing_figures(found: LoadMap | None) -> list[Figure]:
    """Load of every expert."""
    if found is None:
        return []
    title = "Load of experts"
    return [Figure("routing", title, found.caption, load_map(title, found))]


def level_figures(found: LevelMap | None) -> list[Figure]:
    """What the precision scheduler did."""
    if found is None:
        return []
    title, caption = "Precision while training", "fusion groups that changed; steps across, darker is more bits"
    return [Figure("precision", title, caption, level_map(title, found))]


def figures_of(report: Report) -> dict[str, list[Figure]]:
    """Figures by section: each scheme's name, `training`, `layers` and `routing`."""
    found = {name: retention_figures(name, entry) for name, entry in report.schemes.items()}
    found["training"] = curve_figures(report.curves) + level_figures(report.levels)
    layers = report.metrics.get("layers", {})
    several = len(report.schemes) > 1
    found["layers"] = [
        replace(f, heading=f"{f.heading}, {name}") if several else f
        for name in report.schemes for f in layer_figures(name, layers.get(name, {}))
    ]  # fmt: skip
    found["routing"] = routing_figures(report.routing)
    return found


def facts_of(report: Report) -> list[tuple[str, str]]:
    """Run facts as (name, text); nested mappings are joined."""
    facts = report.metrics.get("facts", {})
    return [(name.replace("_", " "), _plain(value)) for name, value in facts.items() if value is not None]


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(_labelled(str(k), v) for k, v in value.items())
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _labelled(key: str, value: Any) -> str:
    label = words.NAMES.get(key, key.replace("_", " "))
    if isinstance(value, Mapping):
        return f"{label} ({_plain(value)})"
    return _plain(value) if key == "name" else f"{label} {_plain(value)}"


def coverage_words(coverage: Mapping[str, Any]) -> str:
    share = coverage.get("expert_share")
    experts = "" if share is None else f", {words.percent(share, 1)} of those in routed experts"
    return (f"{words.percent(coverage['quantized_share'], 1)} of {coverage['parameters']:,} parameters are "
            f"quantised{experts}.")  # fmt: skip


def caption_of(entry: words.Entry) -> str:
    held = entry["held_out"]
    return (
        f"Held-out text: {held['tokens']:,} tokens, {held['units']:,} {held['unit']}s. "
        f"Small print under a value is its 95\u00a0% interval; bold marks the smallest distance."
    )


def render_html(report: Report) -> str:
    """The page as text."""
    scheme, entry = report.first
    figures = figures_of(report)

    def grid(found: Sequence[Figure]) -> str:
        drawn = "".join(page.figure(f.svg, f.heading, f.caption, f.tall) for f in found)
        return f'<div class="figures">{drawn}</div>'

    facts = dict(facts_of(report))
    kicker = ["QDeepSeek run report", *(facts[k] for k in ("model", "date") if k in facts), scheme]
    unstated = [text for text in words.recovered(entry) if "not stated" in text]
    lede = " ".join([*words.sentences(entry, scheme), *unstated])
    body = [page.header(kicker, words.title(entry), lede), page.tiles(entry)]
    for name, item in report.schemes.items():
        heading = "What survives" if len(report.schemes) == 1 else f"What survives at {name}"
        shown = page.results(item, caption_of(item)) + (grid(figures[name]) if figures[name] else "")
        body.append(page.section(heading, "", shown))
    inside = [*figures["training"], *figures["layers"], *figures["routing"]]
    if inside:
        body.append(page.section("Inside the run", "", grid(inside)))
    coverage = report.metrics.get("coverage") or {}
    if coverage.get("rows"):
        table = page.coverage_table(coverage["rows"])
        body.append(page.section("What was quantised", coverage_words(coverage), table))
    body.append(_how(report, entry))
    return page.page(f"{words.title(entry)} · {scheme}", "\n".join(body))


def _how(report: Report, entry: words.Entry) -> str:
    seconds, facts = report.metrics.get("seconds"), facts_of(report)
    parts = page.facts_list(facts) if facts else ""
    parts += page.config_block(report.config) if report.config else ""
    how = page.section("How this run was made", "", parts) if parts else ""
    if seconds:
        total = f"{words.duration(sum(seconds.values()))} in all."
        how += page.section("Where the time went", total, page.seconds_table(seconds))
    return how + page.section("How to read the numbers", "", page.notes_list(words.reading_notes(entry, report.part)))


def render_markdown(report: Report) -> str:
    """The same content for a terminal pager or a code host; figures are files beside it."""
    scheme, entry = report.first
    figures = figures_of(report)
    lines = [f"# {words.title(entry)}", "", " ".join(words.sentences(entry, scheme)), ""]
    lines += [*(f"- {text}" for text in words.recovered(entry)), ""]
    for name, item in report.schemes.items():
        lines += [f"## {name}", "", caption_of(item), "", *_table(["model", *words.HEADINGS], [
            [words.name_of(c), *(_markdown_cell(cell) for cell in cells)] for c, cells in words.table_rows(item)
        ])]  # fmt: skip
        lines += _images(figures[name])
    for key, heading in (("training", "Training"), ("layers", "Layer errors"), ("routing", "Routing")):
        if figures[key]:
            lines += [f"## {heading}", "", *_images(figures[key])]
    coverage = report.metrics.get("coverage") or {}
    if coverage.get("rows"):
        rows = [[r["part"], f"`{r['module_class']}`", r["scheme"], f"{r['parameters']:,}", words.percent(r["share"], 1)]
                for r in coverage["rows"]]  # fmt: skip
        head = ["part", "module class", "scheme", "parameters", "share"]
        lines += ["## Coverage", "", coverage_words(coverage), "", *_table(head, rows)]
    seconds = report.metrics.get("seconds") or {}
    if facts := facts_of(report):
        lines += ["## Run", "", *(f"- {n}: {v}" for n, v in facts), ""]
    if seconds:
        lines += ["## Time", "", *_table(["stage", "time"], [[s, words.duration(t)] for s, t in seconds.items()])]
    lines += ["## How to read the numbers", "", *(f"- {n}" for n in words.reading_notes(entry, report.part)), ""]
    return "\n".join(lines)


def _markdown_cell(cell: words.Cell) -> str:
    value = f"**{cell.text}**" if cell.best else cell.text
    return f"{value} ({cell.note})" if cell.note else value


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *("--:" for _ in head[1:])]
    return [*("| " + " | ".join(c.replace("|", r"\|") for c in row) + " |" for row in (head, rule, *rows)), ""]


def _images(found: Sequence[Figure]) -> list[str]:
    return [line for f in found for line in (f"![{f.heading}: {f.caption}](figures/{f.name}.svg)", "")]


def write_report(run: Path) -> Path:
    """Draw the report of a run's folder into RUN/report; returns the path of report.html."""
    report, folder = Report.from_folder(run), run / "report"
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for figure in [f for group in figures_of(report).values() for f in group]:
        (folder / "figures" / f"{figure.name}.svg").write_text(standalone(figure.svg), encoding="utf-8")
    for name, text in (("report.md", render_markdown(report)), ("report.html", render_html(report))):
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder / name)
    return folder / "report.html"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.report", description="Draw reports of finished runs.")
    parser.add_argument("run", type=Path, nargs="+", help="folder of a run: it holds metrics.json")
    parser.add_argument("--ablation", type=Path, metavar="JSON", help="also collect the runs of a sweep, one row each")
    args = parser.parse_args(arguments)
    for run in args.run:
        print(write_report(run))
    if args.ablation:
        rows = ablation.write_rows(args.run, args.ablation)
        print("\n".join(_table(ablation.HEAD, ablation.table_rows(rows))))


if __name__ == "__main__":
    main()
