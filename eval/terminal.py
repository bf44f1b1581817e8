"""The result as plain text: one aligned table under 100 columns, the gap recovered, and the path of the report."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.words import Entry, name_of, number, percent, recovered, size, span, table_rows

# heading, width of the value, width of its interval (0: not shown), index into words.HEADINGS
COLUMNS = (
    ("loss", 7, 0, 0), ("Δ loss", 9, 20, 1), ("KL to FP_ft", 12, 18, 2), ("same top", 9, 0, 3), ("top-1", 9, 0, 4),
    ("bits", 7, 0, 5),
)  # fmt: skip
WIDTH = 98


def scheme_table(scheme: str, entry: Entry) -> str:
    """Columns of one scheme; distances to FP_ft with their intervals in brackets."""
    held_out = entry["held_out"]
    lines = [
        f"{scheme}: {held_out['tokens']:,} held-out tokens, {held_out['units']:,} {held_out['unit']}s; Δ and KL "
        f"against FP_ft, 95 % intervals",
        " " * 6 + "".join(heading.rjust(width) + " " * room for heading, width, room, _ in COLUMNS),
    ]
    for column, cells in table_rows(entry):
        line = name_of(column)[:9].ljust(6)
        for _, width, room, index in COLUMNS:
            cell = cells[index]
            line += cell.text.replace("\u00a0", " ").rjust(width)
            if room:
                line += (f" [{cell.note.replace(' to ', ' ')}]" if cell.note else "").ljust(room)
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
            lines.append(f"gap recovered by {name_of(column)}: {', '.join(parts)}")
    for text in recovered(entry):
        if "not stated" in text:
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ")
    if entry["bytes"] is not None:
        full = f" instead of {size(entry['bytes_bf16'])} in bf16" if entry["bytes_bf16"] else ""
        bits = entry["bits_per_weight"]
        packed = f", {number(bits, 2)} bits a quantised weight" if bits is not None else ""
        lines.append(f"on disk: {size(entry['bytes'])}{full}{packed}")
    return [text.replace("\u00a0", " ") for text in lines]


def summary(metrics: Mapping[str, Any], report: Path | None = None) -> str:
    """What the main job prints at its end."""
    blocks = [scheme_table(name, entry) for name, entry in metrics["schemes"].items()]
    if report is not None:
        blocks.append(f"report: {report}")
    return "\n\n".join(blocks)
