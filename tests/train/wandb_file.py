"""Reads an offline .wandb file back: LevelDB's log format around the protobufs that wandb ships.

:W&B + version (7 bytes), then blocks of 32768 bytes; a record is one chunk (kind 1) or several (2 first, 4 last)
chunk = crc32 of kind and data, size, kind (4 + 2 + 1 bytes), data; what is left of a block below 7 bytes is padding
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7


@dataclass
class Artifact:
    name: str
    kind: str
    references: dict[str, str]  # path inside of the artifact -> where the file lies
    uploads: list[str]  # paths whose bytes would be sent


@dataclass
class WandbFile:
    """One attempt of a run, as W&B's server would get it from `wandb sync`."""

    folder: Path
    run: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[Artifact] = field(default_factory=list)
    exit_code: int | None = None  # None: it never said that it ended

    @property
    def names(self) -> set[str]:
        """Everything that was logged, W&B's own keys left out."""
        return {name for row in self.history for name in row if not name.startswith("_")}

    def values(self, name: str) -> list[Any]:
        return [row[name] for row in self.history if name in row]

    def table(self, name: str) -> list[dict[str, Any]]:
        """Rows of the last table of this name."""
        content = json.loads((self.folder / "files" / self.values(name)[-1]["path"]).read_text())
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]

    def page(self, name: str) -> str:
        return (self.folder / "files" / self.values(name)[-1]["path"]).read_text(encoding="utf-8")


def records(file: Path) -> Iterator[Any]:
    """Protobuf records of the file; what a kill left half written at its end is left out."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = file.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B", data[:HEADER]
    while position + HEADER <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEADER:
            position += room
            continue
        crc, size, kind = struct.unpack("<IHB", data[position : position + HEADER])
        if size == 0 and kind == 0:
            position += room
            continue
        chunk = data[position + HEADER : position + HEADER + size]
        if len(chunk) < size:
            return
        assert zlib.crc32(chunk, zlib.crc32(bytes([kind]))) & 0xFFFFFFFF == crc, f"{file}: checksum at {position}"
        position, parts = position + HEADER + size, (chunk if kind in (1, 2) else parts + chunk)
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def read(file: Path) -> WandbFile:
    """Everything of the file that the tests ask for. Nested keys become mappings."""
    found = WandbFile(file.parent)
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run = {key: getattr(record.run, key) for key in ("run_id", "run_group", "project", "display_name")}
            _update(found.config, record.run.config.update)
        elif kind == "config":
            _update(found.config, record.config.update)
        elif kind == "history":
            found.history.append({})
            _update(found.history[-1], record.history.item)
        elif kind == "summary":
            _update(found.summary, record.summary.update)
        elif kind == "artifact":
            contents = record.artifact.manifest.contents
            found.artifacts.append(Artifact(
                record.artifact.name, record.artifact.type, {c.path: c.ref for c in contents if c.ref},
                [c.path for c in contents if not c.ref],
            ))  # fmt: skip
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def attempts(folder: Path) -> list[WandbFile]:
    """Those of the run in this folder, first one first."""
    return [read(file) for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _update(into: dict[str, Any], items: Any) -> None:
    for item in items:
        *path, last = [item.key] if item.key else list(item.nested_key)
        target = into
        for part in path:
            target = target.setdefault(part, {})
        target[last] = json.loads(item.value_json)
