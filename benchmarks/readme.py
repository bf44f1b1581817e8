"""Writes the tables of README.md and docs/results.md from docs/results/*.json: `python -m benchmarks.readme`.

A table stands between `<!-- name -->` and `<!-- /name -->`. `--run FOLDER` first takes the metrics of a finished
`python train.py` over into docs/results/main_job.json; `--check` writes nothing and fails where a page differs.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import method_tables
from benchmarks.method_tables import Table
from eval.ablation import HEAD, mean_se, table_rows

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "ablation.md")
NAMES = {
    "base": "base",
    "fp_ft": "FP_ft",
    "rtn": "RTN of FP_ft",
    "gptq": "GPTQ of FP_ft",
    "qat": "**QAT, as exported**",
}
METHODS = {
    "rtn": "RTN",
    "gptq": "GPTQ",
    "rtn_rotated": "RTN, rotated",
    "gptq_rotated": "GPTQ, rotated",
    "autoround": "AutoRound",
    "torchao_qat": "torchao QAT",
    "torchao_qat_unfused": "torchao QAT, experts unfused",
    "qat": "QAT",
}


def load(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *("--:" for _ in head[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def interval(values: list[float] | None, digits: int = 4) -> str:
    return f" [{values[0]:.{digits}f}, {values[1]:.{digits}f}]" if values else ""


def main_job(data: dict[str, Any]) -> str:
    """The result of `python train.py`: one row a column, distances to FP_ft with 95 % intervals."""
    (scheme, entry), *_ = data["metrics"]["schemes"].items()
    ci, rows = entry["ci95"], []
    for column, name in NAMES.items():
        gap = entry["gap_recovered_by"].get(column, {})
        shown = [f"{gap[m]:.0%}" if gap.get(m) is not None else "" for m in ("loss", "kl")]
        delta = "" if column == "fp_ft" else f"{entry['delta_loss'][column]:+.4f}{interval(ci['delta_loss'][column])}"
        kl = "" if column == "fp_ft" else f"{entry['kl'][column]:.4f}{interval(ci['kl'][column])}"
        agree = "" if column == "fp_ft" else f"{entry['agreement'][column]:.2%}"
        bits = f"{entry['bits_per_weight']:.2f}" if column in ("rtn", "gptq", "qat") else "16"
        rows.append([name, f"{entry['loss'][column]:.4f}", delta, kl, agree, *shown, bits])
    head = [
        "",
        "loss",
        "Δ loss to FP_ft",
        "KL to FP_ft",
        "same top-1",
        "gap recovered, loss",
        "gap recovered, KL",
        "bits",
    ]
    held = entry["held_out"]
    minutes = sum(data["metrics"]["seconds"].values()) / 60
    note = (f"`{data['command']}`, scheme {scheme}, seed {data['metrics']['facts']['seed']}, commit "
            f"`{data['metrics']['facts']['commit']}`; {held['tokens']:,} held-out tokens of {held['units']} "
            f"{held['unit']}s, 95 % bootstrap intervals over {held['unit']}s; {minutes:.1f} minutes.")  # fmt: skip
    return table(head, rows) + "\n\n" + note


def by_seed(rows: list[dict[str, Any]], scheme: str, method: str, key: str) -> dict[int, float]:
    return {r["seed"]: r[key] for r in rows if r["scheme"] == scheme and r["method"] == method}


def gaps(rows: list[dict[str, Any]], scheme: str, method: str, key: str) -> list[float]:
    """Gap recovered by a method, one value a seed."""
    fp = by_seed(rows, scheme, "fp_ft", key) if key == "loss" else {}
    rtn, own = by_seed(rows, scheme, "rtn", key), by_seed(rows, scheme, method, key)
    return [(rtn[s] - own[s]) / (rtn[s] - fp.get(s, 0.0)) for s in sorted(own) if s in rtn]


def quality(data: dict[str, Any]) -> str:
    """Loss above FP_ft and KL to it by scheme and method, mean ± standard error over seeds."""
    rows, lines = data["rows"], []
    for scheme in dict.fromkeys(r["scheme"] for r in rows):
        fp = by_seed(rows, scheme, "fp_ft", "loss")
        for method, name in METHODS.items():
            loss, kl = by_seed(rows, scheme, method, "loss"), by_seed(rows, scheme, method, "kl")
            if not loss:
                continue
            delta, delta_se = mean_se([loss[s] - fp[s] for s in loss])
            kl_mean, kl_se = mean_se(list(kl.values()))
            gap = ["", ""]
            if method != "rtn":
                found = [mean_se(gaps(rows, scheme, method, key)) for key in ("loss", "kl")]
                gap = [f"{m:.0%} ± {s:.0%}" for m, s in found]
            share = next(r["quantized_share"] for r in rows if r["scheme"] == scheme and r["method"] == method)
            bold = "**" if method == "qat" else ""
            lines.append([scheme, f"{bold}{name}{bold}", f"{delta:+.4f} ± {delta_se:.4f}",
                          f"{kl_mean:.4f} ± {kl_se:.4f}", *gap, f"{share:.1%}"])  # fmt: skip
    seeds = len({r["seed"] for r in rows})
    note = f"`{data['command']}`, commit `{data['commit']}`, {seeds} seeds, mean ± standard error."
    head = ["scheme", "method", "Δ loss to FP_ft", "KL to FP_ft", "recovered, loss", "recovered, KL", "quantised"]
    return table(head, lines) + "\n\n" + note


def cost(data: dict[str, Any]) -> str:
    """Step time and peak memory over a plain fine-tune step."""
    lines = []
    for row in data["rows"]:
        ratios = [
            f"{t['median']:.2f}" + (f" [{t['min']:.2f}, {t['max']:.2f}]" if "min" in t else "")
            for t in row["time_ratio"].values()
        ]
        lines.append(
            [row["model"], row["variant"], *ratios, f"{row['memory_ratio']:.2f}" if row["memory_ratio"] else "–"]
        )
    accumulate = list(data["rows"][0]["time_ratio"])
    head = ["model", "variant", *(f"time ×, accumulation {a}" for a in accumulate), "peak memory ×"]
    note = (f"`{data['command']}`, commit `{data['commit']}`, fp32, {data['threads']} threads, "
            f"{data['tokens_per_micro_batch']} tokens a micro-batch; median [range] over "
            f"rounds, each paired with a plain step.")  # fmt: skip
    return table(head, lines) + "\n\n" + note + (f" {data['note']}." if "note" in data else "")


def ablation(data: dict[str, Any]) -> str:
    """What each method adds to plain QAT, by scheme and variant."""
    rows = data["rows"]
    steps, part = sorted({r["steps"] for r in rows}), sorted({r["evaluated_on"] for r in rows})
    note = (f"`{data['command']}`, commit `{data['commit']}`, {', '.join(map(str, steps))} steps of QAT, "
            f"{' and '.join(part)} part, mean ± standard error over seeds; differences are within a seed.")  # fmt: skip
    return table(HEAD, table_rows(rows)) + "\n\n" + note


def drawn(draw: Callable[[dict[str, Any]], Table]) -> Callable[[dict[str, Any]], str]:
    def text(data: dict[str, Any]) -> str:
        head, rows, note = draw(data)
        return table(head, rows) + "\n\n" + note

    return text


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "main_job": main_job, "quality": quality, "cost": cost, "ablation": ablation,
    **{name: drawn(getattr(method_tables, name)) for name in ("routing", "instability", "lora")},
}  # fmt: skip


def filled(text: str) -> str:
    """The page with every table drawn anew; a table whose results do not exist stays as it is."""
    for name, draw in TABLES.items():
        data = load(name)
        if data is not None:
            block = f"<!-- {name} -->\n{draw(data)}\n<!-- /{name} -->"
            text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, b=block: b, text, flags=re.S)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a finished main job")
    parser.add_argument("--command", default="python train.py", help="command of that run")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.run:
        metrics = json.loads((args.run / "metrics.json").read_text())
        metrics["facts"]["command"] = args.command  # without the folder of this machine
        (RESULTS / "main_job.json").write_text(
            json.dumps({"command": args.command, "metrics": metrics}, indent=1) + "\n"
        )
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text and args.check:
            sys.exit(f"{page.name}: a table differs from docs/results; run python -m benchmarks.readme")
        if new != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
