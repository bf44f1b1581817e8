"""docs/scaling.md and its files: the plans are those of this code, the measured ratios what they are said to be."""

import json
import sys

import pytest

from benchmarks import memory_model, scaling

MEASURED = scaling.RESULTS / "memory_model.json"


def test_page_and_plans_are_those_of_this_code(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scaling", "--check"])
    scaling.main()


def test_predictions_are_those_of_this_code_and_within_ten_percent():
    content = json.loads(MEASURED.read_text())
    assert {row["model"] for row in content["rows"]} == set(memory_model.MODELS)
    for row in content["rows"]:
        found = memory_model.predict(row["model"], row["variant"], content["batch"], content["length"], small=False)
        assert round(found["total"]) == row["predicted_bytes"], row["model"]
        assert row["ratio"] == pytest.approx(row["predicted_bytes"] / row["measured_bytes"])
        assert abs(row["ratio"] - 1) < 0.1, (row["model"], row["variant"])


@pytest.mark.slow
def test_a_row_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    out = tmp_path / "memory_model.json"
    words = ["--small", "--models", "moe_v3", "--variants", "distilled", "--batch", "1", "--length", "16"]
    monkeypatch.setattr(sys, "argv", ["memory_model", *words, "--out", str(out)])
    memory_model.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["measured_bytes"] > 0 and row["predicted_bytes"] > 16 * row["parameters"]
    monkeypatch.setattr(sys, "argv", ["memory_model", *words[:-1], "32", "--predict", "--out", str(out)])
    with pytest.raises(SystemExit):
        memory_model.main()
    assert "was measured with other" in capsys.readouterr().err
