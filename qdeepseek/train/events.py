"""RUN/events.jsonl: what a method decided during a run, one JSON object a line.

    {"kind": "precision", "n": 3, "step": 41, …}

`n` counts the decisions of one kind. A method keeps the count in its checkpoint, so that a run that is continued
drops its lines from there on and writes them again: no line twice, none missing, whenever it was killed. Lines of
other kinds are left alone. Rank 0 writes; the others count.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

FILE = "events.jsonl"


class EventLog:
    """The lines of one kind in the events.jsonl of a run's folder."""

    def __init__(self, folder: Path, kind: str):
        self.file, self.kind, self.count = folder / FILE, kind, 0

    def append(self, **fields: Any) -> dict[str, Any]:
        """Write one event and return it; a number that is not finite is written as null."""
        entry = {"kind": self.kind, "n": self.count, **{k: _plain(v) for k, v in fields.items()}}
        self.count += 1
        self._write(json.dumps(entry))
        return entry

    @rank_zero_only
    def _write(self, line: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")

    def rewind(self, count: int) -> None:
        """Forget what was written after the checkpoint with this count, and half a line that a kill left."""
        self.count = count
        self._trim()

    @rank_zero_only
    def _trim(self) -> None:
        if not self.file.is_file():
            return
        lines = self.file.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _valid(line) and not self._later(json.loads(line))]
        if len(kept) < len(lines):
            temporary = self.file.with_name(self.file.name + ".tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(temporary, self.file)

    def _later(self, entry: dict[str, Any]) -> bool:
        return entry.get("kind") == self.kind and entry.get("n", 0) >= self.count


def read_events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Events of one kind, in order; none where there is no file."""
    file = folder / FILE
    if not file.is_file():
        return []
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if _valid(line)]
    return [entry for entry in entries if entry.get("kind") == kind]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _valid(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
