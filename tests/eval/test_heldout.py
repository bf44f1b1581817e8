"""Windows with document ids, and rows of a JSONL file."""

import pytest
import torch

from eval.heldout import document_batches, jsonl_texts


def test_every_token_once_with_its_document():
    tokens = torch.tensor([9, 1, 2, 9, 3, 9, 4, 5, 6, 7])
    batches = document_batches(tokens, length=3, batch_size=2, boundary=9)
    assert [b["input_ids"].shape for b in batches] == [(2, 3), (1, 3)]
    assert torch.equal(torch.cat([b["input_ids"] for b in batches]).flatten(), tokens[:9])
    assert torch.cat([b["document_ids"] for b in batches]).flatten().tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 3]
    assert batches[0]["labels"].equal(batches[0]["input_ids"])


def test_a_limit_spreads_windows_over_the_text():
    tokens = torch.arange(100)
    batches = document_batches(tokens, length=10, batch_size=8, boundary=None, limit=3)
    assert batches[0]["input_ids"][:, 0].tolist() == [0, 40, 90]  # 4.5 rounds to even
    assert "document_ids" not in batches[0]
    assert len(document_batches(tokens, length=10, batch_size=8, boundary=None, limit=99)) == 2


def test_too_little_text():
    with pytest.raises(ValueError, match="5 tokens, fewer than one window of 8"):
        document_batches(torch.arange(5), length=8, batch_size=1, boundary=None)


def test_jsonl(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "two", "x": 1}\n')
    assert jsonl_texts(file) == ["one", "two"]
    file.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(ValueError, match=r"line 2: no string field 'text' \(found: body\)"):
        jsonl_texts(file)
    file.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        jsonl_texts(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="no rows"):
        jsonl_texts(file)
    with pytest.raises(FileNotFoundError, match="no such file"):
        jsonl_texts(tmp_path / "absent.jsonl")
