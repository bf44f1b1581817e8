"""The numbers of a run as words: formats, the headline, and the table every output shares.

Reads an entry of `metrics.json` (eval/retention.py). Whatever was measured is said, also when quantisation-aware
training lost to rounding or when there was no gap to recover.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]
NAMES = {"base": "Base", "fp_ft": "FP_ft", "rtn": "RTN", "gptq": "GPTQ", "qat": "QAT"}
MEANING = {
    "base": "before fine-tuning",
    "fp_ft": "fine-tuned, unquantised",
    "rtn": "FP_ft rounded to nearest",
    "gptq": "FP_ft through GPTQ",
    "qat": "trained with the quantiser in the loop",
}
NONE = "–"


def number(value: float | None, digits: int = 4, sign: bool = False) -> str:
    """Fixed decimals with a true minus; a dash for None."""
    if value is None:
        return NONE
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.replace("-", "−")


def percent(value: float | None, digits: int = 0) -> str:
    return NONE if value is None else f"{number(100 * value, digits)}\u00a0%"


def span(interval: Sequence[float] | None, digits: int = 4, scale: float = 1.0, sign: bool = False) -> str:
    """`low to high`, or nothing without an interval."""
    if interval is None:
        return ""
    low, high = (number(scale * x, digits, sign) for x in interval)
    return f"{low} to {high}"


def size(n: float | None) -> str:
    """Bytes in the decimal unit that leaves one to three digits before the point."""
    if n is None:
        return NONE
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= step:
            return f"{n / step:.{2 if n < 10 * step else 1}f}\u00a0{unit}"
    return f"{n:.0f}\u00a0B"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}\u00a0s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}\u00a0min {rest:02d}\u00a0s"
    return f"{minutes // 60}\u00a0h {minutes % 60:02d}\u00a0min"


def name_of(column: str) -> str:
    return NAMES.get(column, column)


def columns_of(entry: Entry) -> list[str]:
    """Columns that were run, in order: base, FP_ft, RTN, GPTQ, further peers, QAT last."""
    present = [c for c in entry["loss"] if entry["loss"][c] is not None]
    return [c for c in present if c != "qat"] + [c for c in present if c == "qat"]


@dataclass(frozen=True)
class Cell:
    """A value and what stands small beside it, mostly its interval; `best`: the lowest among quantised columns."""

    text: str
    note: str = ""
    best: bool = False


HEADINGS = ("loss, perplexity", "Δ loss to FP_ft", "KL to FP_ft", "same top token", "top-1 accuracy",
            "bits per weight")  # fmt: skip


def table_rows(entry: Entry) -> list[tuple[str, list[Cell]]]:
    """(column, cells under HEADINGS) of every column that was run."""
    columns = columns_of(entry)
    quantized = [c for c in columns if c not in ("base", "fp_ft")]
    ci = entry["ci95"]

    def best(measure: str, column: str) -> bool:
        values = [entry[measure][c] for c in quantized]
        return len(values) > 1 and column in quantized and entry[measure][column] == min(values)

    rows = []
    for c in columns:
        reference = c == "fp_ft"
        delta = Cell(NONE) if reference else Cell(
            number(entry["delta_loss"][c], 4, True), span(ci["delta_loss"][c], 4, 1, True), best("delta_loss", c)
        )  # fmt: skip
        kl = Cell(NONE) if reference else Cell(number(entry["kl"][c]), span(ci["kl"][c]), best("kl", c))
        agreement = Cell(NONE) if reference else Cell(
            percent(entry["agreement"][c], 2), span(ci["agreement"][c], 2, 100)
        )  # fmt: skip
        bits, folder = (entry["bits_per_weight"], entry["bytes"]) if c in quantized else (16.0, entry["bytes_bf16"])
        rows.append((c, [
            Cell(number(entry["loss"][c]), number(entry["perplexity"][c], 3)), delta, kl, agreement,
            Cell(percent(entry["accuracy"][c], 2)), Cell(number(bits, 2), size(folder)),
        ]))  # fmt: skip
    return rows


def title(entry: Entry) -> str:
    """The finding of a run in one line."""
    gap, delta = entry["gap_recovered"]["loss"], entry["delta_loss"]["qat"]
    if delta is None:
        return "INT4 without training in the loop"
    if gap is None:
        return "Rounding costs too little here to measure a recovery"
    if gap <= 0:
        return "Training in the loop did not beat rounding"
    if gap >= 1:
        return "The quantised model is as good as the unquantised one"
    return f"QAT recovers {percent(gap)} of what rounding costs"


def _versus(entry: Entry, column: str) -> str:
    key = f"qat_minus_{column}"
    if key not in entry or entry[key]["loss"] is None:
        return ""
    difference, interval = entry[key]["loss"], entry["ci95"][key]["loss"]
    name = name_of(column)
    left = entry["delta_loss"][column]
    lead = f"{name} of the same model leaves {number(left)}" if left > 0 else f"{name} gives {number(left, 4, True)}"
    if interval is None or interval[0] <= 0 <= interval[1]:
        return f"{lead}, not clearly different from QAT."
    better = "lower" if difference < 0 else "higher"
    return f"{lead}; QAT is {better} by {number(abs(difference))} ({span(sorted(abs(x) for x in interval))})."


def sentences(entry: Entry, scheme: str) -> list[str]:
    """What stands behind the title, one statement each."""
    rtn, qat = entry["delta_loss"]["rtn"], entry["delta_loss"]["qat"]
    found = []
    if rtn is not None:
        moves = "raises" if rtn > 0 else "lowers"
        found.append(f"Rounding the fine-tuned model to {scheme} {moves} its held-out loss by "
                     f"{number(abs(rtn))} nats a token.")  # fmt: skip
    if qat is not None and rtn is not None and 0 < qat < rtn:
        found.append(f"With the quantiser in the training loop {number(qat)} of that remain.")
    elif qat is not None:
        found.append(f"With the quantiser in the training loop the change is {number(qat, 4, True)}.")
    return found + [text for column in columns_of(entry) if (text := _versus(entry, column))]


def recovered(entry: Entry) -> list[str]:
    """Gap recovered by QAT in loss and in KL, each with its interval or the reason why it is not stated."""
    found = []
    for measure, label in (("loss", "loss"), ("kl", "KL to FP_ft")):
        gap, reason = entry["gap_recovered"][measure], entry["gap_recovered_reason"][measure]
        if gap is not None:
            interval = span(entry["ci95"]["gap_recovered"][measure], 0, 100)
            found.append(f"Gap recovered in {label}: {percent(gap)} (95\u00a0% interval {interval}).")
        elif reason and entry["loss"]["qat"] is not None:
            reason = reason.replace(" -", " −").replace("(-", "(−")
            found.append(f"Gap recovered in {label} is not stated: {reason}.")
    return found


def reading_notes(entry: Entry, part: str = "report") -> list[str]:
    """How the numbers were made, for the foot of a report; `part` is what was scored, report or select."""
    held_out = entry["held_out"]
    use = "nothing was chosen on them" if part == "report" else "of the select part, on which choices are made"
    return [
        f"All columns are scored on the same {held_out['tokens']:,} held-out tokens of {held_out['units']:,} "
        f"{held_out['unit']}s; {use}.",
        f"Intervals are 95\u00a0% percentile intervals of {held_out['resamples']:,} bootstrap resamples of "
        f"{held_out['unit']}s, paired across columns.",
        "FP_ft is the unquantised model fine-tuned on the same number of tokens. Gap recovered is "
        "(RTN of FP_ft − QAT) / (RTN of FP_ft − FP_ft), never against the untuned base.",
        "KL is KL(FP_ft ‖ column) in nats a token over the whole vocabulary; same top token is the share of "
        "positions where both models predict the same token.",
        "Bits per weight count scales and zero points of the packed tensors as they lie in the exported folder; "
        "RTN and GPTQ use the same format, so they have QAT's size. Base and FP_ft are counted in bf16.",
    ]
