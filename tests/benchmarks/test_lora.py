"""The memory comparison at toy size: one row, its own process, counts that can be checked."""

import json
import sys

import pytest

from benchmarks import lora


@pytest.mark.slow
def test_rows_and_file(tmp_path, monkeypatch, capsys):
    out = tmp_path / "lora.json"
    words = ["--small", "--variants", "lora recomputed", "--steps", "2", "--length", "16", "--rank", "2"]
    monkeypatch.setattr(sys, "argv", ["lora", *words, "--out", str(out)])
    lora.main()
    content = json.loads(out.read_text())
    assert content["command"].startswith("python -m benchmarks.lora --small") and content["commit"]
    (row,) = content["rows"]
    assert row["variant"] == "lora recomputed" and row["peak_bytes"] > 0 and row["step_seconds"] > 0
    assert row["optimizer_bytes"] == 2 * 4 * row["trainable_parameters"] < row["weights_bytes"]


def test_one_step_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lora", "--steps", "1"])
    with pytest.raises(SystemExit):
        lora.main()
    assert "--steps 1: the first step is not timed, give at least 2" in capsys.readouterr().err
