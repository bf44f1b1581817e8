"""Records as training rows: raw text, or chat messages [{role, content}, ...], checked field by field.

The kind is one for the whole data set and follows from the configured fields: prompt and response if they
are given, else what the first record holds (messages before text). A row of another kind is an error.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from qdeepseek.data.sources import DataError, Record

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Fields:
    """Names of the columns that are read; None switches a kind off."""

    text: str | None = "text"
    messages: str | None = "messages"
    prompt: str | None = None
    response: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) != (self.response is None):
            raise DataError(
                f"data.prompt_field={self.prompt} and data.response_field={self.response}: give both or none"
            )
        if self.text is None and self.messages is None and self.prompt is None:
            raise DataError("data: set text_field, messages_field, or prompt_field and response_field")


@dataclass(frozen=True, slots=True)
class Row:
    """One document. Exactly one of `text` and `messages` is set; `group` keeps related rows in one part;
    `part` is set only where the source has its own split."""

    where: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    group: str | None = None
    part: str | None = None


def rows_from_records(records: Iterable[Record], fields: Fields, source: str) -> list[Row]:
    """Check and convert all records; blank texts are left out (line-based corpora are full of them).

    Raises DataError with the place of the row for a missing field, a wrong type, an unknown role, a
    conversation without anything to train on; and with `source` when no row is left.
    """
    rows = list(_rows(records, fields))
    if not rows:
        raise DataError(f"{source}: no rows; the data set is empty or all its texts are blank")
    return rows


def _rows(records: Iterable[Record], fields: Fields) -> Iterator[Row]:
    kind: str | None = "pair" if fields.prompt else None
    for where, record in records:
        kind = kind or _kind(where, record, fields)
        group = None if fields.group is None else str(_field(where, record, fields.group, "group_field"))
        if kind == "text":
            text = _string(where, record, str(fields.text), "text_field")
            if text.strip():
                yield Row(where, text=text, group=group)
        elif kind == "messages":
            value = _field(where, record, str(fields.messages), "messages_field")
            yield Row(where, messages=check_messages(where, value, str(fields.messages)), group=group)
        else:
            prompt = _string(where, record, str(fields.prompt), "prompt_field")
            response = _string(where, record, str(fields.response), "response_field")
            pair = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            yield Row(where, messages=check_messages(where, pair, "prompt and response"), group=group)


def _kind(where: str, record: dict[str, Any], fields: Fields) -> str:
    if fields.messages and record.get(fields.messages) is not None:
        return "messages"
    if fields.text and record.get(fields.text) is not None:
        return "text"
    expected = " or ".join(repr(f) for f in (fields.messages, fields.text) if f)
    raise DataError(
        f"{where}: no field {expected}, found {_names(record)}; set data.text_field, data.messages_field, or "
        f"data.prompt_field and data.response_field to what the data calls them"
    )


def _names(record: dict[str, Any]) -> str:
    return ", ".join(repr(k) for k, v in record.items() if v is not None) or "no fields"


def _field(where: str, record: dict[str, Any], name: str, option: str) -> Any:
    value = record.get(name)
    if value is None:
        raise DataError(
            f"{where}: no field {name!r} (data.{option}), found {_names(record)}; every row needs it, "
            f"remove the row or keep rows of another kind in another data set"
        )
    return value


def _string(where: str, record: dict[str, Any], name: str, option: str) -> str:
    return _check_text(where, _field(where, record, name, option), f"field {name!r}")


def _check_text(where: str, value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} must be a string, found {type(value).__name__} {str(value)[:60]!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {what} is not valid Unicode text: {error}") from error
    return value


def check_messages(where: str, messages: Any, field: str) -> tuple[dict[str, Any], ...]:
    """Messages with a known role and string content (None only beside tool_calls); null keys are dropped.

    Raises DataError also for an empty list, an answer without text, and a conversation without an assistant
    message or that starts with one: nothing could be trained on it.
    """
    if not isinstance(messages, list | tuple) or not messages:
        found = "an empty list" if isinstance(messages, list | tuple) else type(messages).__name__
        raise DataError(f"{where}: field {field!r} must be a list of {{role, content}}, found {found}")
    checked = tuple(_check_message(where, m, f"message {i} of {field!r}") for i, m in enumerate(messages, 1))
    roles = [m["role"] for m in checked]
    if "assistant" not in roles:
        raise DataError(f"{where}: no message with role 'assistant', so there is nothing to train on")
    if roles[0] == "assistant":
        raise DataError(f"{where}: the first message has role 'assistant'; a 'user' message must precede it")
    return checked


def _check_message(where: str, message: Any, what: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        found = type(message).__name__
        raise DataError(f"{where}: {what} must be an object with role and content, found {found}")
    kept = {key: value for key, value in message.items() if value is not None}
    if "role" not in kept:
        raise DataError(f"{where}: {what} has no 'role', found {_names(kept)}; rename keys to role and content")
    role = kept["role"]
    if role not in ROLES:
        raise DataError(f"{where}: {what} has unknown role {role!r}; known are {', '.join(ROLES)}")
    if "content" in kept:
        _check_text(where, kept["content"], f"content of {what}")
    elif not kept.get("tool_calls"):
        raise DataError(f"{where}: {what} has no 'content', found {_names(kept)}")
    if role == "assistant" and not kept.get("content", "").strip() and not kept.get("tool_calls"):
        raise DataError(f"{where}: {what} is an empty answer; remove the row or its last turn")
    return kept
