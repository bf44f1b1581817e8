"""Fine-tuning data from end to end: files or a `datasets` name → rows → parts → tokens → packed sequences.

Without `path` and `name` the rows are the shipped questions about the standard library (stdlib_qa.py).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdeepseek.data.chat import encode_row
from qdeepseek.data.packing import PackedDataset, check_length
from qdeepseek.data.rows import Fields, Row, rows_from_records
from qdeepseek.data.sources import DataError, find_files, read_dataset, read_files
from qdeepseek.data.split import PARTS, check_fractions, split_rows
from qdeepseek.data.stdlib_qa import instruction_rows

DEFAULT_LENGTH = 4096


@dataclass(frozen=True)
class SftConfig:
    """What is read and how it is cut; conf/data/sft.yaml has the same keys.

    `path` or `name` (+ `config_name`, `split`) say where rows come from, the `*_field` names what they are
    called there. `max_length` None is the model's limit, at most 4096 (the mask grows with its square).
    `too_long` None is "error" for chats, "split" for text. `template_kwargs` go to the template (`thinking: true`).
    """

    path: str | Sequence[str] | None = None
    name: str | None = None
    config_name: str | None = None
    split: str = "train"
    text_field: str | None = "text"
    messages_field: str | None = "messages"
    prompt_field: str | None = None
    response_field: str | None = None
    group_field: str | None = None
    max_length: int | None = None
    too_long: str | None = None
    fractions: Mapping[str, float] = field(default_factory=lambda: {"train": 0.9, "select": 0.05, "report": 0.05})
    seed: int = 0
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.path and self.name:
            raise DataError(f"data.path={self.path} and data.name={self.name}: give one of them")
        check_fractions(self.fractions)


@dataclass(frozen=True)
class SftData:
    """Packed sequences by part (a part with fraction 0 is absent), and the SHA-256 of the rows."""

    parts: dict[str, PackedDataset]
    data_hash: str
    rows: dict[str, int]


def load_rows(config: SftConfig) -> list[Row]:
    """All rows that `config` names. Raises DataError or FileNotFoundError with the place of what is wrong."""
    fields = Fields(
        text=config.text_field, messages=config.messages_field, prompt=config.prompt_field,
        response=config.response_field, group=config.group_field,
    )  # fmt: skip
    if config.path:
        return rows_from_records(read_files(find_files(config.path)), fields, f"data.path={config.path}")
    if config.name:
        records = read_dataset(config.name, config.config_name, config.split)
        return rows_from_records(records, fields, f"dataset {config.name} [{config.split}]")
    return list(instruction_rows())


def build_sft(config: SftConfig, tokenizer: Any, max_positions: int | None = None) -> SftData:
    """Read, split, tokenise and pack; `max_positions` is the model's limit.

    Raises DataError (see the modules used) before any training: every row is checked and tokenised here.
    """
    length = config.max_length or min(max_positions or DEFAULT_LENGTH, DEFAULT_LENGTH)
    check_length(length, max_positions)
    rows = load_rows(config)
    too_long = config.too_long or ("error" if rows[0].messages is not None else "split")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    parts = {}
    split = split_rows(rows, config.fractions, config.seed)
    for part in PARTS:
        documents = [d for row in split[part] for d in encode_row(row, tokenizer, config.template_kwargs)]
        if documents:
            parts[part] = PackedDataset(documents, length, pad, too_long)
    return SftData(parts, rows_hash(rows), {part: len(split[part]) for part in PARTS})


def rows_hash(rows: Sequence[Row]) -> str:
    """SHA-256 over the content of all rows, in order."""
    digest = hashlib.sha256()
    for row in rows:
        content = json.dumps([row.text, row.messages, row.group], sort_keys=True, default=str)
        digest.update(content.encode() + b"\0")
    return digest.hexdigest()
