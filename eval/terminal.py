"""The result as plain text: one aligned table under 100 columns, the gap recovered, and the path of the report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.words import Entry, name_of, number, percent, size, span, table_rows

COLUMNS = (("loss", 8), ("Δ loss to FP_ft", 27), ("KL to FP_ft", 25), ("same top", 9), ("top-1", 8), ("bits", 6))
CELLS = (0, 1, 2, 3, 4, 6)  # of words.HEADINGS


def scheme_table(scheme: str, entry: Entry) -> str:
    """Columns of one scheme, each value with its interval in brackets."""
    held_out = entry["held_out"]
    lines = [
        f"{scheme}: {held_out['tokens']:,} held-out tokens, {held_out['units']:,} {held_out['unit']}s, "
        f"95 % intervals in brackets",
        " " * 9 + "".join(heading.rjust(width) for heading, width in COLUMNS),
    ]
    for column, cells in table_rows(entry):
        line = name_of(column)[:9].ljust(9)
        for index, (_, width) in zip(CELLS, COLUMNS):
            cell = cells[index]
            note = f" [{cell.note.replace(' to ', ' ')}]" if cell.note and index in (1, 2) else ""
            line += (cell.text.replace("\u00a0", " ") + note).rjust(width)
        lines.append(line.rstrip())
    return "\n".join([*lines, *_gaps(entry)])


def _gaps(entry: Entry) -> list[str]:
    lines = []
    for column, gap in entry["gap_recovered_by"].items():
        intervals = entry["ci95"]["gap_recovered_by"][column]
        parts = [
            f"{label} {percent(gap[m])} [{span(intervals[m], 0, 100).replace(' to ', ' ')}]"
            for m, label in (("loss", "loss"), ("kl", "KL")) if gap[m] is not None
        ]  # fmt: skip
        if parts:
            lines.append(f"gap recovered by {name_of(column)}: {', '.join(parts)}".replace("\u00a0", " "))
    for measure, reason in entry["gap_recovered_reason"].items():
        if reason and entry["delta_loss"]["qat"] is not None:
            lines.append(f"gap recovered in {measure} not stated: {reason}")
    if entry["bytes"] is not None:
        full = f" instead of {size(entry['bytes_full'])}" if entry["bytes_full"] else ""
        bits = entry["bits_per_weight"]
        packed = f", {number(bits, 2)} bits a quantised weight" if bits is not None else ""
        lines.append(f"on disk: {size(entry['bytes'])}{full}{packed}".replace("\u00a0", " "))
    return lines


def summary(metrics: Mapping[str, Any], report: Path | None = None) -> str:
    """What the main job prints at its end."""
    blocks = [scheme_table(name, entry) for name, entry in metrics["schemes"].items()]
    if report is not None:
        blocks.append(f"report: {report}")
    return "\n\n".join(blocks)
