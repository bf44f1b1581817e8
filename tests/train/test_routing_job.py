"""Entropy-regularised routing in the main job by two processes: routing.json, its figure, and an exact export."""

import json

import pytest

from tests.train.test_main_job import SHORT, train


@pytest.mark.slow
def test_main_job_with_entropy_routing(tmp_path, tiny_folder):
    folder = tmp_path / "run"
    done = train(
        f"model.path={tiny_folder}", f"run_dir={folder}", *SHORT, "method/routing=entropy", "strategy=ddp",
        "trainer.devices=2", "trainer.accelerator=cpu", "trainer.threads=1", "model.gradient_checkpointing=true",
        "method.routing.kl_weight=0.1", "method.routing.bias_speed=0.001", "method.routing.entropy_and_bias=true",
        "method.routing.log_every=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bit for bit" in done.stdout
    found = json.loads((folder / "routing.json").read_text())
    assert found["layers"] == [1, 2] and found["experts"] == 8 and set(found["load"]) == {"qat", "fp_ft"}
    assert [i["step"] for i in found["intervals"]] == [1, 2]
    assert all(i["tokens"] == 2 * 2 * 256 for i in found["intervals"])
    assert all(sum(layer) == pytest.approx(1, abs=1e-5) for layer in found["load"]["qat"])
    assert "Load of experts" in (folder / "report" / "report.html").read_text()
    header = next((folder / "logs" / "qat").rglob("metrics.csv")).read_text().splitlines()[0]
    assert "routing/layer_1/load_entropy_bits" in header and "qat/routing" in header
