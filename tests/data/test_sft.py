"""From a configuration to packed parts: user files, defaults by kind, and errors before any training."""

import json

import pytest
import torch

from qdeepseek.data import sft
from qdeepseek.data.chat import IGNORE
from qdeepseek.data.packing import collate_packed
from qdeepseek.data.rows import Row
from qdeepseek.data.sft import SftConfig, build_sft
from qdeepseek.data.sources import DataError


def write_chats(path, count=60, answer="yes"):
    lines = [
        {"messages": [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": answer}]}
        for i in range(count)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_chats_become_packed_parts(tmp_path, byte_chat_tokenizer):
    data = build_sft(SftConfig(path=write_chats(tmp_path / "a.jsonl")), byte_chat_tokenizer, 512)
    assert sum(data.rows.values()) == 60 and set(data.parts) == {"train", "select", "report"}
    batch = collate_packed([data.parts["train"][0]])
    assert batch["input_ids"].shape == (1, 512)
    trained = batch["input_ids"][batch["labels"] != IGNORE]
    assert set(byte_chat_tokenizer.decode(trained).split("<｜end▁of▁sentence｜>")) == {"yes", ""}


def test_same_rows_same_hash_other_rows_other_hash(tmp_path, byte_chat_tokenizer):
    one = build_sft(SftConfig(path=write_chats(tmp_path / "a.jsonl")), byte_chat_tokenizer, 512)
    same = build_sft(SftConfig(path=write_chats(tmp_path / "b.jsonl")), byte_chat_tokenizer, 512)
    other = build_sft(SftConfig(path=write_chats(tmp_path / "c.jsonl", answer="no")), byte_chat_tokenizer, 512)
    assert one.data_hash == same.data_hash != other.data_hash
    for a, b in zip(one.parts["train"], same.parts["train"]):
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_long_chats_are_refused_and_long_texts_split_by_default(tmp_path, byte_chat_tokenizer):
    path = write_chats(tmp_path / "a.jsonl", answer="y" * 40)
    with pytest.raises(DataError, match=r"a\.jsonl:\d+: \d+ tokens are more than data\.max_length=32"):
        build_sft(SftConfig(path=path, max_length=32), byte_chat_tokenizer, 512)
    text = tmp_path / "t.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"{i} " + "word " * 20}) for i in range(60)))
    data = build_sft(SftConfig(path=str(text), max_length=32), byte_chat_tokenizer, 512)
    assert data.parts["train"].stats.split == data.rows["train"]


def test_default_rows_are_the_shipped_questions(monkeypatch, byte_chat_tokenizer):
    pair = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    shipped = [Row(p, messages=pair, part=p) for p in ("train", "select", "report")]
    monkeypatch.setattr(sft, "instruction_rows", lambda: shipped)
    assert build_sft(SftConfig(), byte_chat_tokenizer, 512).rows == {"train": 1, "select": 1, "report": 1}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"path": "a", "name": "b"}, "data.path=a and data.name=b: give one"),
        ({"fractions": {"train": 2.0}}, "sum to 1"),
    ],
)
def test_contradictory_options(options, message):
    with pytest.raises(DataError, match=message):
        SftConfig(**options)


def test_length_beyond_the_model_is_refused_before_reading(byte_chat_tokenizer):
    with pytest.raises(DataError, match="max_position_embeddings 512"):
        build_sft(SftConfig(path="missing.jsonl", max_length=1024), byte_chat_tokenizer, 512)


def test_default_length_is_the_models_limit_at_most_4096(tmp_path, byte_chat_tokenizer):
    path = write_chats(tmp_path / "a.jsonl")
    for limit, length in [(512, 512), (163840, 4096), (None, 4096)]:
        assert build_sft(SftConfig(path=path), byte_chat_tokenizer, limit).parts["train"].length == length


def test_missing_file_and_empty_file(tmp_path, byte_chat_tokenizer):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: no such file"):
        build_sft(SftConfig(path=str(tmp_path / "nowhere.jsonl")), byte_chat_tokenizer, 512)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"data\.path=.*empty\.jsonl: no rows"):
        build_sft(SftConfig(path=str(tmp_path / "empty.jsonl")), byte_chat_tokenizer, 512)
