"""`python -m eval.perplexity` on folders and texts."""

import json
import math

import pytest
import torch

from eval.perplexity import main
from qdeepseek.train.tokenizer import pretrained_byte_tokenizer


@pytest.fixture
def folders(tiny_model, tmp_path):
    names = [str(tmp_path / name) for name in ("a", "b")]
    for name in names:
        tiny_model.save_pretrained(name)
        pretrained_byte_tokenizer(512).save_pretrained(name)
        with torch.no_grad():
            tiny_model.lm_head.weight.mul_(1.5)
    return names


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"number {i} of the rows " * 3}) for i in range(12)))
    return str(file)


def test_folders_against_a_teacher(folders, rows, tmp_path, capsys):
    out = tmp_path / "out.json"
    main([*folders, "--data", rows, "--length", "32", "--teacher", folders[0], "--json", str(out)])
    first, second = json.loads(out.read_text())
    assert first["kl"] == 0 and first["agreement"] == 1 and second["kl"] > 0
    assert first["unit"] == "document" and first["units"] == 12
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    low, high = second["ci95"]["loss"]
    assert low < second["loss"] < high
    text = capsys.readouterr().out
    assert f"{first['loss']:.4f}" in text and "agreement" in text and "12 documents" in text


def test_user_errors_end_with_one_line(folders, rows):
    for arguments, message in (
        (["--data", "absent.jsonl"], "absent.jsonl: no such file"),
        (["--data", rows, "--field", "body"], "line 1: no string field 'body'"),
        (["--data", rows, "--length", "1024"], "exceeds max_position_embeddings 512|fewer than one window"),
        (["--data", rows, "--length", "32", "--teacher", "./absent"], "no such folder"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([folders[0], *arguments])
