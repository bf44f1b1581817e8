"""Loss on the assistant's tokens and the EOS after them, for every kind of chat template."""

import numpy as np
import pytest

from qdeepseek.data.chat import IGNORE, encode_row
from qdeepseek.data.rows import Row
from qdeepseek.data.sources import DataError
from qdeepseek.data.tokenizer import BOS, EOS
from tests.data import chat_templates as T
from tests.data.conftest import make_tokenizer

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
ONE = ({"role": "user", "content": "Wie heißt du?"}, {"role": "assistant", "content": "Über-Modell é"})
TWO = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2"},
)
THINK = (
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "<think>\nR1\n</think>\n\nA1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "<think>\nR2\n</think>\n\nA2"},
)


def encode(template, messages, eos=EOS, special=(), **template_kwargs):
    """[(whole text, [trained piece, ...]), ...] of the samples of one conversation."""
    tokenizer = make_tokenizer(template, eos, special)
    samples = encode_row(Row("f:7", messages=tuple(messages)), tokenizer, template_kwargs)
    return [(tokenizer.decode(s.input_ids), trained_pieces(s, tokenizer)) for s in samples]


def trained_pieces(sample, tokenizer):
    trained = sample.labels != IGNORE
    assert np.array_equal(sample.labels[trained], sample.input_ids[trained])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(int), [0]])))
    return [tokenizer.decode(sample.input_ids[a:b]) for a, b in zip(edges[::2], edges[1::2])]


@pytest.mark.parametrize(
    "template, eos, pieces",
    [
        (T.GENERATION, EOS, [f"Über-Modell é{EOS}"]),
        (T.GENERATION_EOS_OUTSIDE, EOS, [f"Über-Modell é\n{EOS}"]),
        (T.V2, EOS, [f" Über-Modell é{EOS}"]),
        (T.CODER, "<|EOT|>", ["Über-Modell é\n<|EOT|>"]),
        (T.R1_PLAIN, EOS, [f"Über-Modell é{EOS}"]),
        (T.V31, EOS, [f"Über-Modell é{EOS}"]),
        (T.QWEN3, "<|im_end|>", ["Über-Modell é<|im_end|>"]),
        (T.LLAMA3, EOS, [f"Über-Modell é{EOS}"]),
    ],
)
def test_one_turn_trains_the_answer_and_its_eos_alone(template, eos, pieces):
    [(text, trained)] = encode(template, ONE, eos, ("<|im_end|>", "<|im_start|>"))
    assert trained == pieces
    assert text.count("Wie heißt du?") == 1 and text.count(BOS) == template.count("bos_token")


@pytest.mark.parametrize(
    "template, eos, lead",
    [
        (T.GENERATION, EOS, ""), (T.V2, EOS, " "), (T.CODER, "<|EOT|>", ""), (T.R1_PLAIN, EOS, ""),
        (T.V31, EOS, ""), (T.QWEN3, "<|im_end|>", ""), (T.LLAMA3, EOS, ""), (T.GENERATION_EOS_OUTSIDE, EOS, ""),
    ],
)  # fmt: skip
def test_all_turns_of_a_stable_template_are_trained_in_one_sample(template, eos, lead):
    [(text, trained)] = encode(template, TWO, eos, ("<|im_end|>", "<|im_start|>"))
    end = "\n" + eos if template in (T.CODER, T.GENERATION_EOS_OUTSIDE) else eos
    assert trained == [f"{lead}A1{end}", f"{lead}A2{end}"]
    assert "Be brief." in text


@pytest.mark.parametrize(
    "template, blank_end", [(T.V2, 0), (T.R1, 0), (T.QWEN3, 1), (T.LLAMA3, 0), (T.NO_END, 0), (T.V31, 0)]
)
def test_what_precedes_the_loss_is_the_prompt_at_serving_time(template, blank_end):
    tokenizer = make_tokenizer(template, special=("<|im_end|>", "<|im_start|>"))
    for messages in (ONE, TWO):
        sample = encode_row(Row("f", messages=messages), tokenizer)[-1]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert sample.input_ids[: len(prompt)].tolist() == prompt
        assert (sample.labels[: len(prompt)][-1:] == IGNORE).all()
        assert (sample.labels[len(prompt) :] != IGNORE).sum() == len(sample.labels) - len(prompt) - blank_end


def test_generation_tags_keep_the_reasoning():
    [(_, trained)] = encode(T.GENERATION, THINK)
    assert trained == [f"<think>\nR1\n</think>\n\nA1{EOS}", f"<think>\nR2\n</think>\n\nA2{EOS}"]


def test_r1_trains_the_reasoning_that_its_template_strips():
    """History without reasoning, prompt that opens <think>, and the loss on what follows: as when served."""
    first, second = encode(T.R1, THINK)
    assert first == (
        f"{BOS}{USER}Q1{ASSISTANT}<think>\nR1\n</think>\n\nA1{EOS}", [f"R1\n</think>\n\nA1{EOS}"]
    )  # fmt: skip
    assert second == (
        f"{BOS}{USER}Q1{ASSISTANT}\n\nA1{EOS}{USER}Q2{ASSISTANT}<think>\nR2\n</think>\n\nA2{EOS}",
        [f"R2\n</think>\n\nA2{EOS}"],
    )


def test_r1_answers_without_reasoning_close_the_opened_think():
    first, second = encode(T.R1, TWO)
    assert first[1] == [f"\n</think>\n\nA1{EOS}"]
    assert second[0] == f"{BOS}Be brief.{USER}Q1{ASSISTANT}A1{EOS}{USER}Q2{ASSISTANT}<think>\n\n</think>\n\nA2{EOS}"


def test_r1_takes_reasoning_content():
    messages = (THINK[0], {"role": "assistant", "content": "A1", "reasoning_content": "R1"})
    assert encode(T.R1, messages) == encode(T.R1, THINK[:2])


def test_r1_plain_lets_the_model_open_think_itself():
    first, second = encode(T.R1_PLAIN, THINK)
    assert first[1] == [f"<think>\nR1\n</think>\n\nA1{EOS}"]
    assert second[1] == [f"<think>\nR2\n</think>\n\nA2{EOS}"] and "R1" not in second[0]


def test_v31_reasoning_needs_thinking_mode():
    with pytest.raises(DataError, match=r"f:7: message 2 has reasoning.*non-thinking mode.*template_kwargs"):
        encode(T.V31, THINK)
    first, second = encode(T.V31, THINK, thinking=True)
    assert first[0] == f"{BOS}{USER}Q1{ASSISTANT}<think>\nR1\n</think>\n\nA1{EOS}"
    assert second[1] == [f"\nR2\n</think>\n\nA2{EOS}"]


def test_qwen3_history_without_reasoning_makes_a_sample_for_each_turn():
    first, second = encode(T.QWEN3, THINK, "<|im_end|>", ("<|im_start|>",))
    assert first[1] == ["<think>\nR1\n</think>\n\nA1<|im_end|>"]
    assert second[1] == ["<think>\nR2\n</think>\n\nA2<|im_end|>"]
    assert "R1" not in second[0] and "A1<|im_end|>\n" in second[0]


def test_end_token_that_is_not_eos_is_trained():
    [(text, trained)] = encode(T.QWEN3, ONE, EOS, ("<|im_end|>", "<|im_start|>"))
    assert trained[0].startswith("Über-Modell é<|im_end|>") and text.endswith("<|im_end|>\n")


def test_eos_is_added_where_the_template_ends_a_turn_with_nothing():
    [(text, trained)] = encode(T.NO_END, TWO)
    assert trained == ["A1", f"A2{EOS}"] and text.endswith(f"A2{EOS}")


def test_messages_after_the_last_answer_are_left_out():
    [(text, _)] = encode(T.GENERATION, (*ONE, {"role": "user", "content": "Thanks"}))
    assert "Thanks" not in text


def test_token_merged_across_the_boundary_is_trained():
    """A BPE that merges the prompt's last character with the answer's first: the loss covers the merged token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(["[U]", "[A]", "</s>", " ", "q", "x", "y", " x"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[(" ", "x")]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", additional_special_tokens=["[U]", "[A]"]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[U]' + m['content'] }}"
        "{% else %}{{ '[A] ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[A] ' }}{% endif %}"
    )
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "xy"})
    [sample] = encode_row(Row("f", messages=messages), tokenizer)
    assert tokenizer.convert_ids_to_tokens(sample.input_ids.tolist()) == ["[U]", "q", "[A]", " x", "y", "</s>"]
    assert (sample.labels != IGNORE).tolist() == [False] * 3 + [True] * 3


def test_text_is_framed_by_bos_and_eos(byte_chat_tokenizer):
    [sample] = encode_row(Row("f", text="é"), byte_chat_tokenizer)
    assert sample.input_ids.tolist() == [256, 0xC3, 0xA9, 257] == sample.labels.tolist()


@pytest.mark.parametrize(
    "template, messages, message",
    [
        (None, ONE, "f:7: chat messages need a chat template"),
        (T.GENERATION, ({"role": "user", "content": f"x{EOS}"}, ONE[1]), f"f:7: message 1 contains {EOS!r}"),
        ("{{ raise_exception('only pairs') }}", ONE, "f:7: the chat template refuses these messages: only pairs"),
        ("{{ messages[0].content.nope.nope }}", ONE, "f:7: the chat template refuses"),
        (T.R1, ({"role": "system", "content": "S1"}, {"role": "system", "content": "S2"}, *ONE),
         "f:7: the chat template drops or changes message 1 (role 'system')"),
        (T.V2.replace("message['content'] + eos_token", "'ok' + eos_token"), ONE,
         "f:7: the chat template does not render message 2 (assistant) as a continuation"),
        (T.V2.replace("'Assistant:'", "'Bot:'"), ONE, "they part at character"),
    ],
)  # fmt: skip
def test_refusals_name_the_row(template, messages, message):
    with pytest.raises(DataError) as error:
        encode(template, messages)
    assert message in str(error.value)


def test_tokenizer_without_eos_is_refused(byte_chat_tokenizer):
    class NoEos:
        eos_token_id = None

    with pytest.raises(DataError, match="no eos_token"):
        encode_row(Row("f", text="x"), NoEos())
