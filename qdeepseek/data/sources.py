"""Files and `datasets` names as records: (where, mapping) pairs, `where` naming the file and line for errors.

A path is a JSONL, JSON or Parquet file, a folder of them, a glob, or a list of those. A `.json` file may hold
one array or several values one after another; both report the line on which a value starts. Rows of Parquet
and of `datasets` have no lines and are counted from 1. Nothing here looks inside a record: see rows.py.
"""

import glob
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = tuple[str, dict[str, Any]]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


class DataError(ValueError):
    """Data that cannot be used as given; the message names the file and line, the rule and the remedy."""


def find_files(path: str | Sequence[str]) -> list[Path]:
    """Data files that `path` names, in a stable order, each once.

    Raises FileNotFoundError for a path or glob without a match, DataError for a file of an unknown kind and
    for a folder without data files.
    """
    files: dict[Path, None] = {}
    for item in [path] if isinstance(path, str) else path:
        root = Path(item).expanduser()
        if root.is_dir():
            found = [f for f in sorted(root.rglob("*")) if f.is_file() and _kind(f) and f.name[0] != "."]
            if not found:
                raise DataError(f"{item}: no {', '.join(SUFFIXES)} file in this folder")
        elif root.exists():
            found = [root]
        else:
            found = [Path(f) for f in sorted(glob.glob(str(root), recursive=True)) if Path(f).is_file()]
            if not found:
                raise FileNotFoundError(f"{item}: no such file, folder or glob match; check data.path")
        for file in found:
            if not _kind(file):
                raise DataError(f"{file}: unknown kind of file; data.path takes {', '.join(SUFFIXES)}")
            files.setdefault(file)
    return list(files)


def read_files(files: Sequence[Path]) -> Iterator[Record]:
    """Records of all files in order. Raises DataError with file and line for what cannot be read."""
    for file in files:
        kind = _kind(file)
        read = _parquet_rows if kind == ".parquet" else _json_values if kind == ".json" else _json_lines
        yield from read(file)


def read_dataset(name: str, config: str | None = None, split: str = "train") -> Iterator[Record]:
    """Records of a `datasets` name (or a folder made by `save_to_disk`), memory-mapped, not copied.

    Raises DataError for a name, configuration or split that cannot be loaded.
    """
    import datasets

    label = f"{name} ({config})" if config else name
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            table = datasets.load_from_disk(name)
            table = table[split] if isinstance(table, datasets.DatasetDict) else table
        else:
            table = datasets.load_dataset(name, config, split=split)
    except (ConnectionError, FileNotFoundError, OSError) as error:
        raise DataError(
            f"dataset {label} cannot be loaded: {_first_line(error)}. It is not in the local cache, and the "
            f"hub does not give it (no connection, or no such name); load it where the hub can be reached "
            f"and copy the cache, or save it as JSONL or Parquet and set data.path"
        ) from error
    except Exception as error:  # the library raises many kinds for a wrong configuration, split or file
        raise DataError(
            f"dataset {label}, split {split!r} cannot be loaded: {_first_line(error)}; "
            f"check data.name, data.config_name and data.split"
        ) from error
    for number, row in enumerate(table, start=1):
        yield f"{label}[{split}] row {number}", dict(row)


def _kind(file: Path) -> str:
    """Suffix that tells the format, "" when it is none of SUFFIXES; `.gz` is looked through for JSON."""
    name = file.name.lower()
    stem = name.removesuffix(".gz")
    kind = next((s for s in SUFFIXES if stem.endswith(s)), "")
    return "" if stem != name and kind == ".parquet" else kind


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _open(file: Path) -> Any:
    return gzip.open(file, "rb") if file.name.lower().endswith(".gz") else file.open("rb")


def _object(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, found {type(value).__name__}")
    return where, value


def _json_error(file: Path, first_line: int, error: ValueError) -> DataError:
    if isinstance(error, json.JSONDecodeError):
        line, detail = first_line + error.lineno - 1, f"{error.msg} (column {error.colno})"
    else:
        line, detail = first_line, str(error)
    return DataError(f"{file}:{line}: invalid JSON: {detail}; one JSON object a row is expected, in UTF-8")


def _json_lines(file: Path) -> Iterator[Record]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    value = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig"))
                except ValueError as error:
                    raise _json_error(file, number, error) from error
                yield _object(value, f"{file}:{number}")


def _json_values(file: Path) -> Iterator[Record]:
    """An array of objects, or objects one after another (JSONL under another name, or one pretty object)."""
    with _open(file) as stream:
        data = stream.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _json_error(file, data.count(b"\n", 0, error.start) + 1, error) from error
    decoder = json.JSONDecoder()
    position, line = _skip(text, 0)
    array = text[position : position + 1] == "["
    if array:
        position, line = _skip(text, position + 1, line)
    while position < len(text) and not (array and text[position] == "]"):
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _json_error(file, 1, error) from error
        yield _object(value, f"{file}:{line}")
        position, line = _skip(text, end, line + text.count("\n", position, end))
        if array and text[position : position + 1] == ",":
            position, line = _skip(text, position + 1, line)
        elif array and text[position : position + 1] != "]":
            raise DataError(f"{file}:{line}: invalid JSON: ',' or ']' expected in the array of rows")
    if array and (position >= len(text) or text[position + 1 :].strip()):
        what = "text after the array of rows" if position < len(text) else "the array of rows is not closed"
        raise DataError(f"{file}:{line}: invalid JSON: {what}")


def _skip(text: str, position: int, line: int = 1) -> tuple[int, int]:
    """Position of the next character that is not white space, and its line."""
    end = position
    while end < len(text) and text[end] in " \t\r\n":
        end += 1
    return end, line + text.count("\n", position, end)


def _parquet_rows(file: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file: {_first_line(error)}") from error
