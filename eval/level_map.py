"""Precision of fusion groups over the steps of QAT, from the `precision` lines of a run's events.jsonl.

A decision at step t holds from the forward of step t + 1 on. Groups without a decision never left their target and
are not listed.
"""

from dataclasses import dataclass
from pathlib import Path

from qdeepseek.train.events import read_events


@dataclass(frozen=True)
class LevelMap:
    """`rows`: group -> its (first step, last step + 1, level) in order; levels such as int4, int8, bf16."""

    rows: dict[str, tuple[tuple[int, int, str], ...]]
    first: int
    last: int

    @property
    def levels(self) -> list[str]:
        """Those that occur, fewest bits first."""
        found = {level for spans in self.rows.values() for _, _, level in spans}
        return sorted(found, key=lambda level: int("".join(filter(str.isdigit, level))))


def read_level_map(folder: Path, steps: int | None = None, first: int = 0) -> LevelMap | None:
    """The map of a run of `steps` QAT steps, the first of which is step `first` of the whole run; None without events.

    steps: default up to the first step after the last decision.
    """
    events = read_events(folder, "precision")
    if not events:
        return None
    last = first + (steps or max(event["step"] for event in events) + 2)
    rows: dict[str, list[tuple[int, int, str]]] = {}
    for event in events:
        spans = rows.setdefault(event["group"], [(first, last, event["from"])])
        begin, _, level = spans.pop()
        change = min(last, first + event["step"] + 1)
        spans += [(begin, change, level), (change, last, event["to"])]
    return LevelMap({g: tuple(s for s in spans if s[1] > s[0]) for g, spans in rows.items()}, first, last)
