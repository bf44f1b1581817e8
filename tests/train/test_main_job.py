"""The main job from load to report as a user runs it, in a process of its own, and W&B's offline record of it."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train import wandb_file

ROOT = Path(__file__).parents[2]
SHORT = ["trainer.steps=4", "trainer.accumulate=1", "trainer.validate_every=2", "trainer.log_every=1",
         "data.report_sequences=16", "data.select_sequences=4", "data.batch_size=2", "method.gptq_sequences=4",
         ]  # fmt: skip
PLACES = {"<stage>": "(fp_ft|qat|pretrain)", "<layer>": r"(layer_\d+|layers_\d+-\d+|rest)", "<n>": r"\d+",
          "<group>": "(matrices|vectors|scales)", "<scheme>": r"\w+", "<figure>": r"\w+", "<weight>": r"[\w.]+",
          "<point>": r"[\w.]+", "<measure>": r"\w+"}  # fmt: skip


def train(*overrides: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "train.py", *overrides], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400
    )


@pytest.mark.slow
def test_main_job_with_wandb_failed_then_continued_under_the_same_id(tmp_path, tiny_folder):
    folder = tmp_path / "run"
    options = [f"model.path={tiny_folder}", f"run_dir={folder}", *SHORT[1:], "trainer.steps=8"]
    options += ["logger=wandb", "logger.offline=true"]
    options += ["method/routing=observe", "method.routing.log_every=2", "method/precision=progressive",
                "method.precision.warmup=1", "logger.layers_every=2", "logger.peak_tflops=1"]  # fmt: skip
    folder.mkdir()
    (folder / "report").write_text("in the way of the report, as a full disk would be")
    failed = train(*options)
    assert failed.returncode == 1 and "error: " in failed.stderr, failed.stderr[-3000:]
    assert "routed_experts" in failed.stdout
    before = json.loads((folder / "metrics.json").read_text())
    entry = before["schemes"]["w4a16_g32"]
    assert {"fp_ft", "qat", "export", "evaluate"} <= set(before["seconds"])

    (folder / "report").unlink()
    done = train(*options)  # every stage is complete: taken from the folder, same W&B run
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"report: {folder / 'report' / 'report.html'}" in done.stdout
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["schemes"]["w4a16_g32"]["loss"] == entry["loss"]
    assert set(entry["loss"]) >= {"base", "fp_ft", "rtn", "gptq", "qat"}
    assert {"kl", "agreement", "gap_recovered", "ci95", "bits_per_weight", "bytes"} <= set(entry)
    assert (folder / "export" / "compressed_tensors" / "qdeepseek_manifest.json").is_file()
    assert (folder / "config.yaml").is_file() and (folder / "coverage.json").is_file()

    first, second = wandb_file.attempts(folder)
    ident = (folder / "wandb_id.txt").read_text().strip()
    assert first.run["run_id"] == second.run["run_id"] == ident and first.run["project"] == "qdeepseek"
    assert first.exit_code == 1 and "NotADirectoryError" in first.summary["failure"]
    assert second.exit_code == 0 and "failure" not in second.summary
    assert first.values("attempt") == [0] and second.values("attempt") == [1]
    assert first.values("_step")[-1] < second.values("_step")[0], "what wandb sync needs to append one to the other"
    check_training_record(first)
    check_final_record(second, folder, metrics)
    check_documented(first.names | second.names, first.summary.keys() | second.summary.keys())


def check_training_record(record):
    config = record.config
    assert config["commit"] and config["qat_optim"]["lr"] == 2e-4
    assert config["quant"]["schemes"]["main"]["weight"]["group_size"] == 32
    steps = record.values("trainer/global_step")
    assert len(record.values("fp_ft/loss")) == 8 and len(record.values("qat/kl")) == 4 and max(steps) == 7
    assert all(math.isfinite(v) for name in ("fp_ft/loss", "qat/kl", "qat/gradient_norm") for v in record.values(name))
    assert record.values("fp_ft/lr/matrices")[0] == pytest.approx(2e-4 / 11)  # the first of 10 warm-up steps
    assert record.values("throughput/fp_ft/tokens") == [512 * (step + 1) for step in range(8)]
    assert all(0 < value < 1 for value in record.values("throughput/qat/mfu"))
    load = record.values("routing/layer_1/load")[-1]
    assert load["_type"] == "histogram" and sum(load["values"]) == 2 * 2 * 2 * 256 and len(load["values"]) == 8
    coverage = {row["part"]: row for row in record.table("coverage")}
    assert coverage["routed_experts"]["scheme"] == "W4A16 g32"
    assert len(record.values("precision/group")) > 0


def check_final_record(record, folder, metrics):
    entry = metrics["schemes"]["w4a16_g32"]
    table = {row["model"]: row for row in record.table("report/w4a16_g32")}
    assert {model: row["loss"] for model, row in table.items()} == entry["loss"]
    assert [table["qat"]["kl_low"], table["qat"]["kl_high"]] == entry["ci95"]["kl"]["qat"]
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    events = record.table("precision/events")
    assert [(e["step"], e["group"], e["to"]) for e in events] == [(e["step"], e["group"], e["to"]) for e in lines]
    assert record.page("report/page") == (folder / "report" / "report.html").read_text()
    figures = {f.stem: f.read_text() for f in (folder / "report" / "figures").glob("*.svg")}
    assert {"curves", "routing", "precision", "w4a16_g32_kl"} <= figures.keys()
    for name, svg in figures.items():
        page = record.page(f"figures/{name}")
        assert svg in page and '<meta charset="utf-8">' in page
    (export,) = [a for a in record.artifacts if a.kind == "model"]
    names = {str(f.relative_to(folder / "export")) for f in (folder / "export").rglob("*") if f.is_file()}
    assert export.references.keys() == names and not export.uploads
    assert all(Path(ref.removeprefix("file://")).is_file() for ref in export.references.values())
    assert record.summary["coverage/expert_share"] == 1.0


def check_documented(names, summary):
    """docs/wandb.md names everything that a run logs, and a run logs everything that it promises always."""
    patterns = documented()
    known = [re.compile(pattern) for pattern, _ in patterns]
    unknown = [name for name in sorted(names) if not any(p.fullmatch(name) for p in known)]
    assert not unknown, f"not in docs/wandb.md: {unknown}"
    missing = [p for p, always in patterns if always and not any(re.fullmatch(p, name) for name in names | summary)]
    assert not missing, f"docs/wandb.md promises, and the run did not log: {missing}"


def documented():
    """(pattern, whether every run logs it) of each name in the tables of docs/wandb.md."""
    found = []
    for line in (ROOT / "docs" / "wandb.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            for name in re.findall(r"`([^`]+)`", cells[0]):
                pattern = re.sub(r"<\w+>", lambda m: PLACES[m[0]], re.escape(name).replace("\\-", "-"))
                found.append((pattern, cells[4] == "always"))
    assert len(found) > 30
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [
            "experiment=w4a4",
            "strategy=ddp",
            "trainer.devices=2",
            "trainer.accelerator=cpu",
            "trainer.threads=1",
            "trainer.accumulate=2",
        ],
        ["data=sft", "data.max_length=384", "method.rounding=gptq", "method.start=fp_ft", "method.teacher=base"],
        ["quant=mixed", "method.delay_steps=1", "method.cache=true", "method.distill_weight=0.5"],
    ],
    ids=["rotated, two processes, accumulating", "questions, from GPTQ's codes", "mixed, delayed and cached"],
)
def test_main_job_in_other_ways(tmp_path, tiny_folder, overrides):
    folder = tmp_path / "run"
    done = train(f"model.path={tiny_folder}", f"run_dir={folder}", *SHORT, *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    (entry,) = json.loads((folder / "metrics.json").read_text())["schemes"].values()
    assert all(entry["loss"][column] is not None for column in ("base", "fp_ft", "rtn", "gptq", "qat"))
    assert done.stdout.count("verified") == 1 and "bit for bit" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("tiny", []),
        ("", ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.threads=1",
              "trainer.accumulate=2", "method.rotate=always", "method.recompute=true"]),
    ],
    ids=["shipped model", "two processes, accumulating, rotated, recomputed"],
)  # fmt: skip
def test_main_job_with_adapters(tmp_path, tiny_folder, model, overrides):
    folder = tmp_path / "run"
    options = [f"model.path={model or tiny_folder}", f"run_dir={folder}", *SHORT, "method/lora=default"]
    options += ["quant.schemes.main.method.learned=true", *overrides]
    done = train(*options)
    assert done.returncode == 0, done.stderr[-3000:]
    (entry,) = json.loads((folder / "metrics.json").read_text())["schemes"].values()
    assert all(entry["loss"][column] is not None for column in ("base", "fp_ft", "rtn", "gptq", "qat"))
    assert done.stdout.count("verified") == 1 and "bit for bit" in done.stdout
    bases = {}
    for name in ("adapter", "adapter_fp_ft"):
        config = json.loads((folder / name / "adapter_config.json").read_text())
        bases[name] = config["base_model_name_or_path"]
        assert config["peft_type"] == "LORA" and config["r"] == 16
        assert (folder / name / "adapter_model.safetensors").is_file()
    assert bases["adapter"] == str(folder / "branch")
    checkpoint = torch.load(folder / "checkpoints" / "qat" / "last.ckpt", weights_only=False)
    state = checkpoint["optimizer_states"][0]["state"]
    adapters = [key for key in checkpoint["state_dict"] if "lora_" in key]
    scales = [key for key in checkpoint["state_dict"] if key.endswith("quantizer.scale")]
    assert len(state) == len(adapters) + len(scales) and adapters and scales


@pytest.mark.slow
def test_pretraining_and_plain_fine_tuning(tmp_path):
    made = tmp_path / "pretrain"
    short = ["trainer.steps=3", "trainer.validate_every=2", "data.select_sequences=4"]
    done = train("experiment=pretrain_tiny", f"run_dir={made}", *short, "trainer.devices=1", "strategy=auto")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((made / "model" / "pretraining.json").read_text())["tokens"] == 3 * 8 * 256
    done = train(f"model.path={made / 'model'}", f"run_dir={tmp_path / 'off'}", *SHORT, "quant=off")
    assert done.returncode == 0 and "unquantised fine-tune only" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=./no/such/folder"], "model.path ./no/such/folder: no such folder"),
        (["data.length=1024"], "data.length 1024 exceeds the model's max_position_embeddings 512"),
        (["data=sft", "data.path=missing.jsonl"], "missing.jsonl"),
        (["quant.schemes.main.weight.group_size=96"], "group"),
        (["method/lora=default", "method.lora.targets=[q_prj]"], "method.lora.targets: 'q_prj' means nothing"),
        (["method.start=middle"], "method: start 'middle' is unknown; use branch, fp_ft or base"),
    ],
)
def test_bad_input_is_one_line_before_any_work(tmp_path, tiny_folder, overrides, message):
    folder = tmp_path / "run"
    done = train(f"model.path={tiny_folder}", f"run_dir={folder}", *overrides)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert not (folder / "fp_ft").exists() and not (folder / "checkpoints").exists()
