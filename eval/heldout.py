"""Held-out text as batches that say which document every token comes from.

Documents are framed by BOS and EOS, joined, and cut into windows of `length` without overlap, so that every
token is scored once. Counting the boundary token gives `document_ids` (B, L), which lets intervals resample
documents instead of correlated windows. With a `limit`, windows are spread evenly over the text rather than
taken from its start.
"""

import json
from pathlib import Path

import torch
from torch import Tensor


def document_batches(
    tokens: Tensor, *, length: int, batch_size: int, boundary: int | None, limit: int | None = None
) -> list[dict[str, Tensor]]:
    """Batches of input_ids, labels (the same ids; models shift) and document_ids, int64 (B, length).

    Args:
        tokens: one vector of ids, documents framed by special tokens (data/windows.py, `join_documents`).
        boundary: id that opens (BOS) or closes (EOS) a document; None leaves document_ids out, and intervals
            are over windows.
        limit: at most this many windows.

    Raises ValueError where the text is shorter than one window.
    """
    windows = len(tokens) // length
    if windows == 0:
        raise ValueError(
            f"the held-out text has {len(tokens)} tokens, fewer than one window of {length}; "
            f"give more text or a smaller length"
        )
    chosen = torch.arange(windows)
    if limit is not None and limit < windows:
        chosen = torch.linspace(0, windows - 1, max(1, limit)).round().long()
    ids = tokens[: windows * length].long()
    columns = {"input_ids": ids, "labels": ids}
    if boundary is not None:
        columns["document_ids"] = (ids == boundary).cumsum(0)
    rows = {name: column.view(windows, length)[chosen].split(batch_size) for name, column in columns.items()}
    return [dict(zip(rows, values)) for values in zip(*rows.values())]


def jsonl_texts(file: Path, field: str = "text") -> list[str]:
    """The string `field` of every row of a JSONL file; an unusable row is an error with its line number."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; --data takes `report`, `select` or a JSONL file")
    texts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}: not JSON ({error.msg}); one object a line") from error
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{file}, line {number}: no string field {field!r} (found: {found}); name it with --field")
        texts.append(text)
    if not texts:
        raise ValueError(f"{file}: no rows; give at least one")
    return texts
