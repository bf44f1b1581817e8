"""W&B's offline record of runs that are not evaluated, that fail, and that a sweep's agent names."""

import json
import time

import pytest

from qdeepseek.surgery import Recipe, plan
from qdeepseek.train.loggers import LoggerConfig, wandb_closed, wandb_logger
from qdeepseek.train.wandb_record import figure_page, log_end, log_start
from tests.train import wandb_file
from tests.train.test_config import composed

OFFLINE = LoggerConfig(kind="wandb", offline=True, group="a sweep")


def only_attempt(folder):
    """The record once it is whole: wandb's own process writes it, and `finish` does not wait for the file."""
    deadline = time.monotonic() + 60
    while True:
        (found,) = wandb_file.attempts(folder)
        if found.exit_code is not None or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@pytest.fixture
def coverage(tiny_model):
    return plan(tiny_model, Recipe.from_config(composed("run_dir=x")["quant"]))


def test_a_run_that_is_not_evaluated_leaves_coverage_events_and_its_export(tmp_path, coverage, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "agents-name")
    export = tmp_path / "export" / "compressed_tensors"
    export.mkdir(parents=True)
    (export / "model.safetensors").write_bytes(b"weights")
    event = {"step": 3, "quantity": "loss", "module": "model.layers.1", "where": "output", "what": "NaN", "rank": 0,
             "raised": False, "action": "skip"}  # fmt: skip
    (tmp_path / "guard.json").write_text(json.dumps({"events": [event]}))
    with wandb_closed():
        logger = wandb_logger(OFFLINE, tmp_path, {"job": "qat", "seed": 7})
        log_start(logger, coverage)
        log_end(logger, tmp_path, coverage)
    found = only_attempt(tmp_path)
    assert found.run["run_id"] == "agents-name" == (tmp_path / "wandb_id.txt").read_text().strip()
    assert found.run["run_group"] == "a sweep" and found.config["seed"] == 7 and found.exit_code == 0
    assert found.table("guard/events") == [event]
    assert {row["part"]: row["parameters"] for row in found.table("coverage")}["routed_experts"] > 0
    (artifact,) = [a for a in found.artifacts if a.kind == "model"]
    assert artifact.references == {"compressed_tensors/model.safetensors": (export / "model.safetensors").as_uri()}
    assert not artifact.uploads and not found.names & {"report/page", "precision/events"}


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("no room"), 1), (SystemExit("error: x"), 1),
                                              (SystemExit(0), 0), (KeyboardInterrupt(), 1)])  # fmt: skip
def test_how_a_run_ends(tmp_path, error, code):
    with pytest.raises(type(error)), wandb_closed():
        wandb_logger(OFFLINE, tmp_path, {"job": "qat"})
        raise error
    found = only_attempt(tmp_path)
    assert found.exit_code == code
    assert found.summary.get("failure") == (f"{type(error).__name__}: {error}" if code else None)


def test_a_figure_says_its_encoding_and_escapes_its_title():
    page = figure_page("Δ <loss>", "<svg>Δ</svg>")
    assert '<meta charset="utf-8">' in page and "<title>Δ &lt;loss&gt;</title>" in page and "<svg>Δ</svg>" in page
