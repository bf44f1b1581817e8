"""docs/scaling.md and its files: the plans are those of this code, the measured ratios what they are said to be."""

import json
import sys

import pytest

from benchmarks import expert_chunks, memory_model, scaling

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


def test_peaks_of_zero_are_near_the_plan_and_chunks_lower_them():
    """The plan counts a whole block and its gradient as gathered, which is an upper bound."""
    content = json.loads((scaling.RESULTS / "expert_chunks.json").read_text())
    rows = {(row["strategy"], row["chunks"]): row for row in content["rows"]}
    assert list(rows) == [("zero2", 1), ("zero3", 1), ("zero3", 4), ("zero3", 16)]
    for (strategy, chunks), row in rows.items():
        found = expert_chunks.predict(strategy, chunks, content["batch"], content["length"])
        assert found == row["predicted_bytes"], (strategy, chunks)
        assert all(0.94 < ratio < 1.15 for ratio in row["ratio"].values()), row["ratio"]
        for own, whole in zip(row["losses"], rows["zero2", 1]["losses"], strict=True):
            assert own[:2] == pytest.approx(whole[:2], abs=1e-5), "before Adam's signs part"
    peaks = [rows["zero3", chunks]["measured_bytes"]["backward"] for chunks in (1, 4, 16)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
def test_ranks_of_zero_are_measured(tmp_path, monkeypatch):
    out = tmp_path / "expert_chunks.json"
    words = ["--small", "--rows", "zero3:4", "--length", "16", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["expert_chunks", *words])
    expert_chunks.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert min(row["measured_bytes"].values()) > 0 and len(row["losses"][1]) == expert_chunks.STEPS


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
