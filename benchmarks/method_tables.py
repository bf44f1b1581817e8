"""Tables of docs/ablation.md from docs/results/{routing,instability,lora}.json; benchmarks/readme.py places them."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.ablation import mean_se

Table = tuple[list[str], list[list[str]], str]  # head, rows, note


def _cell(values: Sequence[float], form: str) -> str:
    mean, error = mean_se(values)
    return f"{mean:{form}} ± {error:{form.lstrip('+')}}"


def routing(data: Mapping[str, Any]) -> Table:
    """From a collapsed router: what each variant makes of loads and loss; differences to `none` within a seed."""
    rows, lines = data["rows"], []
    plain = {r["seed"]: r["loss"] for r in rows if r["variant"] == "none"}
    for variant in dict.fromkeys(r["variant"] for r in rows):
        own = [r for r in rows if r["variant"] == variant]
        trained = own[0]["loss_before"] is not None
        lines.append([
            variant, _cell([r["load_entropy_bits"] for r in own], ".3f"),
            _cell([r["unused_experts"] for r in own], ".1f"), _cell([r["max_over_mean"] for r in own], ".2f"),
            _cell([r["loss"] for r in own], ".4f"),
            _cell([r["loss"] - plain[r["seed"]] for r in own], "+.4f") if trained and variant != "none" else "",
        ])  # fmt: skip
    head = ["", "load entropy, bits", "experts without a token", "max / mean load", "loss", "loss − none"]
    steps = round(data["options"]["steps"] * data["options"]["qat_fraction"])
    note = (f"`{data['command']}`, commit `{data['commit']}`, {data['options']['scheme']}, {steps} steps of QAT on "
            f"cross-entropy from `settled`, {data['part']} part, mean ± standard error over seeds.")  # fmt: skip
    return head, lines, note


def instability(data: Mapping[str, Any]) -> Table:
    """Excess loss of what would be served, after a planted fault, with the scheduler and without."""
    rows, lines = data["rows"], []
    for fault in dict.fromkeys(r["fault"] for r in rows):
        for variant in dict.fromkeys(r["variant"] for r in rows):
            own = [r for r in rows if (r["fault"], r["variant"]) == (fault, variant)]
            lines.append([
                fault, variant, _cell([r["target_height"] for r in own], "+.4f"),
                _cell([r["target_duration"] for r in own], ".1f"), _cell([r["target_area"] for r in own], ".3f"),
                _cell([r["height"] for r in own], "+.4f"), _cell([r["final"] for r in own], ".4f"),
                _cell([r["raised"] for r in own], ".1f"),
            ])  # fmt: skip
    head = ["fault", "", "height, at the target", "duration, steps", "area, nats · steps", "height, as it stands",
            "final loss", "groups raised"]  # fmt: skip
    note = f"`{data['command']}`, commit `{data['commit']}`, mean ± standard error over seeds."
    return head, lines, note


def lora(data: Mapping[str, Any]) -> Table:
    """Peak memory of adapters over full QAT of the same kind."""
    lines = [
        [r["variant"], f"{r['trainable_parameters'] / 1e6:.1f} M", f"{r['optimizer_bytes'] / 1e6:.0f} MB",
         f"{r['peak_bytes'] / 1e9:.2f} GB", f"{r['peak_over_full']:.2f}"]
        for r in data["rows"]
    ]  # fmt: skip
    head = ["", "trained parameters", "Adam's moments", "peak", "peak / full"]
    return head, lines, f"`{data['command']}`, commit `{data['commit']}`, fp32."
