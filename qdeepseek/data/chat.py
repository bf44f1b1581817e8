"""Rows as token ids and labels: loss on what the assistant says and on the EOS after it, on nothing else.

The conversation goes through the tokenizer's own chat template, and a trained token is one that overlaps a
character span of the rendering (B: spans [start, end)):

1. templates with `{% generation %}` mark the spans themselves;
2. else span k = render(messages[..k]) minus render(messages[..k-1] + generation prompt), which must be a
   prefix of it. When later turns change the rendering of earlier ones (reasoning stripped from history), each
   assistant turn becomes a sample of its own, with the very context it would have when served;
3. where the template drops the reasoning it is given (DeepSeek-R1), or its generation prompt opens `<think>`,
   the sample is the generation prompt followed by what the model must say then: the reasoning, `</think>` and
   the answer; with no reasoning in the row an empty one, `<think>\\n\\n</think>\\n\\n`, as R1 writes it.

Anything else that the rendering loses or changes is an error that names the row. Labels are -100 where there
is no loss and are not shifted.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qdeepseek.data.rows import Row
from qdeepseek.data.sources import DataError

IGNORE = -100
Message = dict[str, Any]
Span = tuple[int, int]
Sample = tuple[str, list[Span]]
Render = Callable[..., str]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document: `input_ids` (T,) and `labels` (T,) int32, -100 = no loss, not shifted."""

    where: str
    input_ids: np.ndarray
    labels: np.ndarray


def encode_row(row: Row, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> list[Encoded]:
    """Documents of one row: one for text, one or several for a chat (see the module's docstring).

    `tokenizer` is a fast tokenizer of transformers; `template_kwargs` go to its chat template.
    Raises DataError, with the place of the row, for whatever the tokenizer or its template cannot express.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no eos_token, so the model could not learn to stop; set one")
    if row.messages is None:
        ids = tokenizer(row.text, add_special_tokens=False, verbose=False)["input_ids"]
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        tokens = np.array([*bos, *ids, tokenizer.eos_token_id], dtype=np.int32)
        return [Encoded(row.where, tokens, tokens)]
    _check_tokenizer(row, tokenizer)
    last = max(i for i, m in enumerate(row.messages) if m["role"] == "assistant")
    messages = [dict(m) for m in row.messages[: last + 1]]
    render = _renderer(row.where, tokenizer, dict(template_kwargs or {}))
    samples = _marked_sample(messages, tokenizer, render, dict(template_kwargs or {}))
    samples = samples or _prefix_samples(row.where, messages, tokenizer, render)
    _check_nothing_lost(row.where, messages, samples)
    return [_tokenize(row.where, text, spans, tokenizer) for text, spans in samples]


def _check_tokenizer(row: Row, tokenizer: Any) -> None:
    if not tokenizer.chat_template:
        raise DataError(
            f"{row.where}: chat messages need a chat template, and this checkpoint's tokenizer has none; use "
            f"the instruct model's tokenizer, set tokenizer.chat_template, or give raw text (data.text_field)"
        )
    if not tokenizer.is_fast:
        name = type(tokenizer).__name__
        raise DataError(f"{name}: a fast tokenizer is needed to find the assistant's tokens")
    for number, message in enumerate(row.messages or (), start=1):
        for token in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token):
            if token and token in message.get("content", ""):
                raise DataError(
                    f"{row.where}: message {number} contains {token!r}, which the tokenizer reads as a "
                    f"control token; remove it (the template writes its own)"
                )


def _renderer(where: str, tokenizer: Any, template_kwargs: dict[str, Any]) -> Render:
    def render(messages: list[Message], prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **template_kwargs
            )
        except Exception as error:  # templates raise whatever Jinja and their own raise_exception do
            raise DataError(f"{where}: the chat template refuses these messages: {error}") from error

    return render


def _marked_sample(
    messages: list[Message], tokenizer: Any, render: Render, template_kwargs: dict[str, Any]
) -> list[Sample]:
    """The sample as `{% generation %}` marks it; [] when it marks nothing, or loses part of an answer."""
    if not _GENERATION.search(tokenizer.get_chat_template()):
        return []
    text = render(messages)
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True}, **template_kwargs,
    )  # fmt: skip
    mask, spans = [*encoded["assistant_masks"], 0], []
    start = None
    for token, trained in enumerate(mask):
        if trained and start is None:
            start = token
        elif not trained and start is not None:
            spans.append((encoded["offset_mapping"][start][0], encoded["offset_mapping"][token - 1][1]))
            start = None
    turns = [m for m in messages if m["role"] == "assistant"]
    kept = len(spans) == len(turns) and all(_says(text[a:b], m) for (a, b), m in zip(spans, turns))
    return [(text, spans)] if kept else []


def _prefix_samples(where: str, messages: list[Message], tokenizer: Any, render: Render) -> list[Sample]:
    """Samples from prefixes of the conversation: one if they nest, else one for each assistant turn."""
    turns = []
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, text = render(messages[:k], prompt=True), render(messages[: k + 1])
            if not (text.startswith(prompt) and _says(text[len(prompt) :], message)):
                text = prompt + _completion(where, k, message, prompt, text, tokenizer)
            turns.append((text, (len(prompt), len(text))))
    full = turns[-1][0]
    if all(full.startswith(text) for text, _ in turns):
        return [(full, [span for _, span in turns])]
    return [(text, [span]) for text, span in turns]


def _completion(where: str, k: int, message: Message, prompt: str, turn: str, tokenizer: Any) -> str:
    """What the model must say after `prompt` where the template itself does not render it so."""
    reasoning, answer = _reasoning(message)
    context = prompt.rstrip()
    if message.get("tool_calls") or not turn.rstrip().endswith(tokenizer.eos_token):
        raise DataError(_mismatch(where, k, prompt, turn))
    if reasoning is not None and context.endswith("</think>"):
        raise DataError(
            f"{where}: message {k + 1} has reasoning, but the template's generation prompt ends it at once "
            f"(non-thinking mode); set data.template_kwargs (such as thinking: true) or remove the reasoning"
        )
    if context.endswith("<think>"):
        newline = "\n" if len(context) == len(prompt) else ""
        body = "\n</think>\n\n" + answer if reasoning is None else f"{reasoning.strip()}\n</think>{answer}"
        return newline + body + tokenizer.eos_token
    if reasoning is not None:
        return f"<think>\n{reasoning.strip()}\n</think>{answer}{tokenizer.eos_token}"
    raise DataError(_mismatch(where, k, prompt, turn))


def _mismatch(where: str, k: int, prompt: str, turn: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prompt, turn)) if a != b), min(len(prompt), len(turn)))
    return (
        f"{where}: the chat template does not render message {k + 1} (assistant) as a continuation of its "
        f"generation prompt that keeps the answer: they part at character {at}, prompt "
        f"{prompt[at : at + 40]!r}, rendering {turn[at : at + 40]!r}; use a template with "
        f"{{% generation %}} tags"
    )


def _reasoning(message: Message) -> tuple[str | None, str]:
    """(reasoning or None, answer) of an assistant message, from `<think>…</think>` or `reasoning_content`."""
    content = message.get("content", "")
    if message.get("reasoning_content"):
        return message["reasoning_content"], "\n\n" + content
    before, closed, after = content.partition("</think>")
    if not closed:
        return None, content
    return before.partition("<think>")[2] if "<think>" in before else before, after


def _says(rendered: str, message: Message) -> bool:
    """Whether a rendered turn holds the whole answer and the reasoning (templates may trim white space)."""
    reasoning, answer = _reasoning(message)
    return answer.strip() in rendered and (reasoning or "").strip() in rendered


def _check_nothing_lost(where: str, messages: list[Message], samples: list[Sample]) -> None:
    text = samples[-1][0]
    for number, message in enumerate(messages, start=1):
        if message["role"] in ("system", "user") and message.get("content", "").strip() not in text:
            raise DataError(
                f"{where}: the chat template drops or changes message {number} (role {message['role']!r}); "
                f"merge it into a message that the template renders, or use another template"
            )


def _tokenize(where: str, text: str, spans: list[Span], tokenizer: Any) -> Encoded:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    trained = np.zeros(len(ids) + 1, dtype=bool)
    token = 0
    for start, end in spans:
        while token < len(ids) and offsets[token][1] <= start:
            token += 1
        first = token
        while token < len(ids) and offsets[token][0] < end:
            token += 1
        stop = _end_of_turn(ids, first, token, tokenizer)
        trained[first:stop] = True
    if not trained.any():
        raise DataError(f"{where}: the chat template leaves no assistant token to train on")
    last = int(np.flatnonzero(trained)[-1])
    if not text[offsets[last][1] :].strip() and not _is_end(ids[last], tokenizer):
        del ids[last + 1 :]  # the template ends the answer with nothing: the model would never learn to stop
        ids.append(tokenizer.eos_token_id)
        trained[last + 1] = True
    tokens = np.array(ids, dtype=np.int32)
    return Encoded(where, tokens, np.where(trained[: len(ids)], tokens, IGNORE).astype(np.int32))


def _end_of_turn(ids: list[int], first: int, stop: int, tokenizer: Any) -> int:
    """Where the loss of a turn ends: after its end token, which may stand just outside the marked span."""

    def blank(i: int) -> bool:
        return not _is_end(ids[i], tokenizer) and not tokenizer.decode(ids[i]).strip()

    end = stop
    while end > first and blank(end - 1):
        end -= 1
    if end > first and _is_end(ids[end - 1], tokenizer):
        return end
    following = stop
    while following < len(ids) and blank(following):
        following += 1
    return following + 1 if following < len(ids) and ids[following] == tokenizer.eos_token_id else stop


def _is_end(token: int, tokenizer: Any) -> bool:
    """EOS or another special token, such as `<|im_end|>` where the tokenizer's EOS is something else."""
    if token == tokenizer.eos_token_id or token in tokenizer.all_special_ids:
        return True
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and added.special
