"""A held-out split that cannot leak: the part of a row is a function of its normalised content alone.

u = BLAKE2b(seed, key) / 2^64 in [0, 1) picks the part by cumulative fractions. The key is the group if the
row has one, else for text the text, for a chat everything before the first answer except system messages: one
question with two answers stays on one side. Case, white space and Unicode form do not count. So duplicates
share a part, and rows keep theirs when the data is reordered or appended to.
"""

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence

from qdeepseek.data.rows import Row
from qdeepseek.data.sources import DataError

PARTS = ("train", "select", "report")


def normalise(text: str) -> str:
    """Text without what does not make it another text: NFKC, case-folded, white space collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def content_key(row: Row) -> str:
    """The string whose hash decides the part of `row`."""
    if row.group is not None:
        return "group\0" + normalise(row.group)
    if row.messages is None:
        return normalise(row.text or "")
    first = next(i for i, m in enumerate(row.messages) if m["role"] == "assistant")
    return "\0".join(normalise(m.get("content", "")) for m in row.messages[:first] if m["role"] != "system")


def part_of_key(key: str, fractions: Mapping[str, float], seed: int = 0) -> str:
    """Part of one key. `fractions` maps train, select, report to shares that sum to 1."""
    digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest()
    u, bound = int.from_bytes(digest, "big") / 2**64, 0.0
    for part in PARTS:
        bound += fractions.get(part, 0.0)
        if u < bound:
            return part
    return next(p for p in reversed(PARTS) if fractions.get(p, 0.0) > 0)  # rounding left the sum below 1


def split_rows(rows: Sequence[Row], fractions: Mapping[str, float], seed: int = 0) -> dict[str, list[Row]]:
    """Rows by part, in their order; a row with its own `part` goes there.

    Raises DataError for fractions that are not shares of 1, and when a part with a fraction is empty.
    """
    check_fractions(fractions)
    parts: dict[str, list[Row]] = {part: [] for part in PARTS}
    for row in rows:
        parts[row.part or part_of_key(content_key(row), fractions, seed)].append(row)
    empty = [p for p in PARTS if not parts[p] and fractions.get(p, 0.0) > 0]
    if empty:
        counts = ", ".join(f"{p} {len(parts[p])}" for p in PARTS)
        distinct = len({content_key(row) for row in rows})
        raise DataError(
            f"held-out split: part {empty[0]!r} is empty ({counts} of {len(rows)} rows with {distinct} "
            f"distinct keys); rows with the same question, text or group stay together, so give more rows, a "
            f"larger data.fractions.{empty[0]}, or a data.group_field that tells rows apart"
        )
    return parts


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Raises DataError unless `fractions` names known parts, is non-negative, sums to 1 and has train > 0."""
    unknown = [p for p in fractions if p not in PARTS]
    if unknown:
        raise DataError(f"data.fractions: unknown part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    if any(f < 0 for f in fractions.values()) or abs(sum(fractions.values()) - 1) > 1e-6:
        raise DataError(f"data.fractions: {dict(fractions)} must be non-negative and sum to 1")
    if not fractions.get("train", 0.0) > 0:
        raise DataError(f"data.fractions: train must be above 0, found {dict(fractions)}")
