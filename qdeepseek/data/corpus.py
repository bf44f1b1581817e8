"""The corpus that every machine with Python has: the standard library's own sources, split by file.

A document is one `.py` file. Its part follows from the SHA-256 of its path relative to the library, not of
its content: the shipped model was pretrained on one Python's files, and a file that another Python changed by
a line must not move from `train` to `report` there (that would leak). Tests, vendored packages and the
charmap tables of `encodings` are left out: the first two are missing on many installations, the last are
near-duplicates of each other and would leak across parts.
"""

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PARTS = ("train", "select", "report")
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__",
     "ensurepip", "lib-dynload", "turtledemo"}
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One file: `path` relative to the library root (POSIX), its `text`, and the part it belongs to."""

    path: str
    text: str
    part: str


def part_of(path: str, fractions: Sequence[float] = (0.90, 0.05, 0.05)) -> str:
    """Part of a document by the hash of its relative path; `fractions` are those of train, select, report."""
    u = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") / 2**64
    if u < fractions[0]:
        return "train"
    return "select" if u < fractions[0] + fractions[1] else "report"


def stdlib_documents(root: Path | None = None) -> list[Document]:
    """Read every source file of the standard library, sorted by path.

    Raises FileNotFoundError where the installation has no sources (some minimal images strip them).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if EXCLUDED_FOLDERS.isdisjoint(relative.parts[:-1]):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                documents.append(Document(relative.as_posix(), text, part_of(relative.as_posix())))
    if len(documents) < 100:
        raise FileNotFoundError(
            f"{root}: {len(documents)} standard-library sources found, at least 100 are needed; this Python "
            f"was installed without its .py files, use another one or set data.path to your own text"
        )
    return documents


def corpus_hash(documents: Sequence[Document]) -> str:
    """SHA-256 over paths and texts, in order: goes into the manifest as the hash of the data."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.path.encode() + b"\0" + document.text.encode() + b"\0")
    return digest.hexdigest()
