"""Plans of the checkpoints that docs/scaling.md is about: `python -m benchmarks.scaling`.

Writes docs/results/scaling.json, and the tables of docs/scaling.md from it, memory_model.json and expert_chunks.json;
`--check` writes nothing and fails where either differs. Nothing is measured here: every number follows from config
files and the formulas of qdeepseek/plan, so the same commit gives the same file.
"""

import argparse
import json
import re
import sys
from typing import Any

from benchmarks.cost import CONF
from benchmarks.readme import RESULTS, ROOT, table

PAGE = ROOT / "docs" / "scaling.md"
OUT = RESULTS / "scaling.json"
COMMON = ("trainer.precision=bf16-mixed", "length=4096", "data.batch_size=1")
WHOLE = "V3, experts whole"  # in the table of memory alone
CASES = {
    "V2-Lite": ("model=deepseek_v2_lite", "nodes=1", "gpus=8", "tp=1", "quant=w4a16_g32"),
    "V2": ("model=deepseek_v2", "nodes=32", "gpus=8", "tp=8", "quant=w4a16_g128"),
    "V3": ("model=deepseek_v3", "nodes=32", "gpus=8", "tp=8", "quant=w4a16_g128"),
    WHOLE: ("model=deepseek_v3", "model.expert_chunks=1", "nodes=32", "gpus=8", "tp=8", "quant=w4a16_g128"),
    "R1-Distill-Qwen-7B": ("model=r1_distill_qwen_7b", "nodes=1", "gpus=1", "tp=1", "quant=w4a16_g128"),
}
STAGES = ("ddp", "zero1", "zero2", "zero3", "zero3_offload")
PARTS = {
    "states": ("weights", "gradients", "optimizer", "scales", "step"), "teacher": ("teacher",),
    "gathered and buckets": ("gathered", "communication"), "activations and logits": ("activations", "head"),
    "fake-quantised copies": ("fake_quant",), "fake-quant temporary": ("temporary",),
}  # fmt: skip


def plans() -> dict[str, dict[str, Any]]:
    from qdeepseek.plan.compose import configuration
    from qdeepseek.plan.plan import make_plan

    found = {}
    for name, words in CASES.items():
        made = make_plan(*configuration([*words, *COMMON], CONF))
        found[name] = {"command": "qdeepseek plan " + " ".join([*words, *COMMON]), **made.to_dict()}
        found[name].pop("coverage")
    return found


def gb(value: float) -> str:
    return f"{value / 1e9:,.0f}" if value >= 1e11 else f"{value / 1e9:.1f}"


def memory_table(data: dict[str, Any]) -> str:
    """GB on one GPU of every case and stage, and whether it fits."""
    lines = []
    for name, plan in data.items():
        for stage in STAGES[3:] if name == WHOLE else STAGES:
            entry = plan["stages"][stage]
            parts = [gb(sum(entry["memory"][key] for key in keys)) for keys in PARTS.values()]
            total, fits = entry["memory"]["total"], "fits" if entry["fits"] else "no"
            other = entry["other_checkpointing"]
            lines.append([name, stage, *parts, f"**{gb(total)}**", fits, gb(other["total"]),
                          gb(entry["memory"]["host"]) if entry["memory"]["host"] else ""])  # fmt: skip
    head = ["model", "stage", *PARTS, "total, GB", "", "without checkpointing", "host, GB a node"]
    return table(head, lines)


def time_table(data: dict[str, Any]) -> str:
    """Seconds of a step of every case and stage."""
    lines = []
    for name, plan in data.items():
        for stage in STAGES:
            t = plan["stages"][stage]["time"]
            seconds = [t["matrices"], t["fake_quant"], t["host"], t["communication"], t["overlapped"], t["serial"]]
            lines.append([name, stage, *(f"{s:.2f}" for s in seconds), gb(t["bytes"]), f"{t['tokens']:,}"])
    head = ["model", "stage", "matrices", "fake-quant", "host", "communication", "max", "sum", "GB in collectives",
            "tokens a step"]  # fmt: skip
    return table(head, lines)


def export_table(data: dict[str, Any]) -> str:
    """Size of the export, and the kernels that take all of it."""
    lines = []
    for name, plan in data.items():
        size, refusals = plan["export"], plan["refusals"]
        every = [kernel for kernel, refused in refusals.items() if not refused]
        copied = gb(size["copied"]) if size["copied"] else ""
        lines.append([name, f"{plan['tp']}", gb(size["total"]), copied, ", ".join(every)])
    return table(["model", "TP", "export, GB", "copied, GB", "kernels that take every matrix"], lines)


def refusal_table(data: dict[str, Any]) -> str:
    """What Marlin and Machete refuse, and the remedy."""
    lines = []
    for name, plan in data.items():
        for kernel in ("vLLM Marlin", "vLLM Marlin with padding", "vLLM Machete"):
            for refusal in plan["refusals"][kernel]:
                if not refusal["reason"].startswith("no kernel"):
                    lines.append([name, f"{plan['tp']}", kernel, refusal["layer"], refusal["reason"],
                                  refusal["remedy"]])  # fmt: skip
    return table(["model", "TP", "kernel", "matrix", "reason", "what to change"], lines)


def validation_table(data: dict[str, Any]) -> str:
    """Measured peaks against the model's."""
    lines = [
        [row["model"], f"{row['parameters'] / 1e6:.0f} M", row["variant"], f"{row['measured_bytes'] / 1e9:.3f}",
         f"{row['predicted_bytes'] / 1e9:.3f}", f"{row['predicted_bytes'] / row['measured_bytes']:.3f}"]
        for row in data["rows"]
    ]  # fmt: skip
    note = (f"`{data['command']}`, measured at commit `{data['commit']}`, {data['batch']} × {data['length']} tokens, "
            f"{data['dtype']}, {data['steps']} steps.")  # fmt: skip
    return table(["model", "parameters", "variant", "measured, GB", "predicted, GB", "ratio"], lines) + "\n\n" + note


def zero_table(data: dict[str, Any]) -> str:
    """Two ranks' measured peaks against the plan's, by moment; CPU time of a step over that of whole experts."""
    whole = next(row for row in data["rows"] if row["strategy"] == "zero3" and row["chunks"] == 1)
    lines = []
    for row in data["rows"]:
        cells = [row["strategy"], f"{row['chunks']}"]
        for moment in row["ratio"]:
            values = (row["measured_bytes"][moment], row["predicted_bytes"][moment])
            cells += [*(f"{value / 1e9:.3f}" for value in values), f"{row['ratio'][moment]:.3f}"]
        ratio = row["cpu_seconds"] / whole["cpu_seconds"]
        lines.append([*cells, f"{ratio:.2f}" if row["strategy"] == "zero3" else ""])
    note = (f"`{data['command']}`, measured at commit `{data['commit']}`: {data['parameters'] / 1e6:.0f} M parameters, "
            f"{data['experts_of_a_layer'] / 1e6:.0f} M of them the experts of one of three layers, {data['batch']} × "
            f"{data['length']} tokens a rank, {data['dtype']}, gradient checkpointing.")  # fmt: skip
    head = ["strategy", "chunks", "backward measured, GB", "predicted", "ratio", "step measured, GB", "predicted",
            "ratio", "CPU time of a step"]  # fmt: skip
    return table(head, lines) + "\n\n" + note


def filled(text: str, scaling: dict[str, Any], measured: dict[str, Any] | None, zero: dict[str, Any] | None) -> str:
    """The page with its tables drawn anew."""
    blocks = {"memory": memory_table, "time": time_table, "export": export_table, "refusals": refusal_table}
    others = {name: plan for name, plan in scaling.items() if name != WHOLE}
    drawn = {name: draw(scaling if name == "memory" else others) for name, draw in blocks.items()}
    drawn["commands"] = "\n".join(["```", *(plan["command"] for plan in scaling.values()), "```"])
    if measured is not None:
        drawn["validation"] = validation_table(measured)
    if zero is not None:
        drawn["zero"] = zero_table(zero)
    for name, block in drawn.items():
        new = f"<!-- {name} -->\n{block}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, b=new: b, text, flags=re.S)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    content = json.dumps({"command": "python -m benchmarks.scaling", "plans": plans()}, indent=1) + "\n"
    files = (RESULTS / "memory_model.json", RESULTS / "expert_chunks.json")
    measured, zero = (json.loads(file.read_text()) if file.exists() else None for file in files)
    page = filled(PAGE.read_text(encoding="utf-8"), json.loads(content)["plans"], measured, zero)
    for file, new in ((OUT, content), (PAGE, page)):
        if args.check and (not file.exists() or file.read_text(encoding="utf-8") != new):
            sys.exit(f"{file.relative_to(ROOT)}: differs from the plans; run python -m benchmarks.scaling")
        file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
