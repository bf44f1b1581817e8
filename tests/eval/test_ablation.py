"""Runs of a sweep as rows and as a table; every variant of conf composes."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eval import ablation, report
from eval.ablation import row_of, table_rows
from tests.eval.invented_run import invented_run
from tests.train.test_config import CONF, composed


def finished(folder: Path, variant: str | None, seed: int, loss: float) -> Path:
    folder.mkdir(parents=True)
    invented_run(folder)
    metrics = json.loads((folder / "metrics.json").read_text())
    (entry,) = metrics["schemes"].values()
    entry["loss"] |= {"fp_ft": 1.0, "rtn": 1.1, "qat": loss}
    metrics["seconds"], metrics["cpu_seconds"] = {"qat": 30.0}, {"qat": 20.0}
    metrics["facts"] |= {"steps": {"fp_ft": 20, "qat": 10}, "evaluated_on": "select", "commit": "abc"}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    OmegaConf.save(OmegaConf.create({"variant": variant, "seed": seed}), folder / "config.yaml")
    first = {"load_entropy_normalised": [0.0, 0.0], "unused_experts": [7, 7], "step": 5, "topk_changed": [None, None]}
    last = {"load_entropy_normalised": [0.9, 0.8], "unused_experts": [1, 2], "step": 10, "topk_changed": [None, None]}
    routing = {
        "experts": 8,
        "top_k": 2,
        "layers": [1, 2],
        "intervals": [first, last],
        "load": {"qat": [[0.125] * 8] * 2},
    }
    (folder / "routing.json").write_text(json.dumps(routing))
    return folder


def test_a_row_says_what_the_run_measured(tmp_path):
    row = row_of(finished(tmp_path / "a", "cage", 3, 1.02))
    assert row["variant"] == "cage" and row["seed"] == 3 and row["steps"] == 10 and row["step_seconds"] == 3.0
    assert row["step_cpu_seconds"] == 2.0
    assert row["loss"] == 1.02 and row["delta_loss"] == pytest.approx(0.02)
    assert row["load_entropy"] == pytest.approx(0.85) and row["dead_experts"] == 3


def test_differences_are_within_a_seed(tmp_path):
    losses = {("base", 0): 1.05, ("base", 1): 1.03, ("cage", 0): 1.04, ("cage", 1): 1.02, ("cage", 2): 1.0}
    rows = [row_of(finished(tmp_path / f"{v}{s}", v, s, loss)) for (v, s), loss in losses.items()]
    base, cage = table_rows(rows)
    assert base[1:3] == ["base", "2"] and base[4] == "" and base[3] == "+0.0400 ± 0.0100"
    assert cage[1:3] == ["cage", "3"] and cage[4] == "-0.0100 ± 0.0000" and cage[-1] == "1.00 ± 0.00"


def test_folders_that_are_no_variant_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no metrics"):
        row_of(tmp_path)
    with pytest.raises(ValueError, match="variant is not set"):
        row_of(finished(tmp_path / "a", None, 0, 1.0))


def test_every_variant_composes_with_its_own_name():
    names = {f.stem for f in (CONF / "variant").glob("*.yaml")}
    assert names == set(ablation.VARIANTS)
    for name in names:
        config = composed(f"variant={name}", "run_dir=x")
        assert config["variant"] == name and config["method"]["routing"], name


def test_the_report_program_collects_a_sweep(tmp_path, capsys):
    runs = [finished(tmp_path / v, v, 0, loss) for v, loss in (("cage", 1.02), ("base", 1.05))]
    file = tmp_path / "docs" / "ablation.json"
    report.main([*map(str, runs), "--ablation", str(file)])
    found = json.loads(file.read_text())
    assert [row["variant"] for row in found["rows"]] == ["base", "cage"]
    assert found["command"] == "python train.py --multirun experiment=ablation" and found["commit"] == "abc"
    assert "| w4a16_g32 | cage | 1 | +0.0200 | -0.0300 |" in capsys.readouterr().out
