"""The planted instabilities: what is measured of a curve, and a run of a few steps."""

import json

import pytest

from benchmarks.instability import main, measures


def test_measures_of_a_curve():
    curve = [2.0] * 10 + [2.5, 3.0, 2.2, 2.005, 1.9]
    found = measures(curve, 10, 0.01)
    assert found["before"] == 2.0 and found["height"] == 1.0 and found["duration"] == 3
    assert found["area"] == pytest.approx(1.705) and found["final"] == 1.9
    assert measures([2.0] * 12, 10, 0.01)["duration"] == 0


@pytest.mark.slow
def test_a_short_run_writes_both_curves(tmp_path, tiny_folder, text_rows):
    out = tmp_path / "instability.json"
    main(["--faults", "lr_burst", "garbage", "--seeds", "0", "--work", str(tmp_path / "work"), "--out", str(out),
          "--at", "4", "--burst", "1", "--factor", "100", "--probe", "2",
          "--scheduler", "method.precision.warmup=2", "--",
          f"model.path={tiny_folder}", "data=sft", f"data.path={text_rows}", "data.max_length=64", "data.batch_size=2",
          "data.too_long=split", "trainer.steps=16", "method.distill_weight=0", "trainer.accelerator=cpu"])  # fmt: skip
    found = json.loads(out.read_text())
    rows = {(r["fault"], r["variant"]): r for r in found["rows"]}
    assert found["command"].startswith("python -m benchmarks.instability --faults") and found["commit"]
    assert len(rows) == 4 and all(len(r["curve"]) == len(r["curve_target"]) == 8 for r in rows.values())
    assert all(r["at"] == 4 and {"height", "duration", "area", "final"} <= set(r) for r in rows.values())
    curves = [rows[fault, "off"]["curve"] for fault in ("lr_burst", "garbage")]
    assert curves[0][:4] == curves[1][:4] and curves[0][4] != curves[1][4]
    assert rows["lr_burst", "off"]["height"] > 0.05
