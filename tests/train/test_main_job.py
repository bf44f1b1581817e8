"""The main job from load to report as a user runs it, in a process of its own, and W&B's offline record of it."""

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SHORT = ["trainer.steps=4", "trainer.accumulate=1", "trainer.validate_every=2", "trainer.log_every=1",
         "data.report_sequences=16", "data.select_sequences=4", "data.batch_size=2", "method.gptq_sequences=4",
         ]  # fmt: skip


def train(*overrides: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "train.py", *overrides], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400
    )


def wandb_records(file: Path) -> Iterator[object]:
    """Records of an offline .wandb file: LevelDB's log format around wandb's own protobufs."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        crc, size, kind = struct.unpack("<IHB", data[position : position + 7])
        if size == 0 and kind == 0:
            position += room
            continue
        chunk = data[position + 7 : position + 7 + size]
        assert zlib.crc32(chunk, zlib.crc32(bytes([kind]))) & 0xFFFFFFFF == crc
        position, parts = position + 7 + size, (chunk if kind in (1, 2) else parts + chunk)
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


@pytest.mark.slow
def test_main_job_with_wandb_then_resumed_under_the_same_id(tmp_path, tiny_folder):
    folder = tmp_path / "run"
    options = [f"model.path={tiny_folder}", f"run_dir={folder}", *SHORT, "logger=wandb", "logger.offline=true"]
    done = train(*options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "routed_experts" in done.stdout and f"report: {folder / 'report' / 'report.html'}" in done.stdout

    metrics = json.loads((folder / "metrics.json").read_text())
    entry = metrics["schemes"]["w4a16_g32"]
    assert set(entry["loss"]) >= {"base", "fp_ft", "rtn", "gptq", "qat"}
    assert {"kl", "agreement", "gap_recovered", "ci95", "bits_per_weight", "bytes"} <= set(entry)
    assert {"fp_ft", "qat", "export", "evaluate"} <= set(metrics["seconds"])
    assert (folder / "export" / "compressed_tensors" / "qdeepseek_manifest.json").is_file()
    assert (folder / "config.yaml").is_file() and (folder / "coverage.json").is_file()

    again = train(*options)  # every stage is complete: taken from the folder, same W&B run
    assert again.returncode == 0, again.stderr[-3000:]
    second = json.loads((folder / "metrics.json").read_text())["schemes"]["w4a16_g32"]
    assert second["loss"] == entry["loss"]

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    ident = (folder / "wandb_id.txt").read_text().strip()
    assert len(files) == 2 and all(ident in f.name for f in files)
    keys, config, artifacts = set(), {}, 0
    for record in wandb_records(files[0]):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            keys |= {item.key or "/".join(item.nested_key) for item in record.history.item}
        if kind == "config":
            config |= {u.key or "/".join(u.nested_key): u.value_json for u in record.config.update}
        artifacts += kind == "request" and record.request.WhichOneof("request_type") == "log_artifact"
        artifacts += kind == "artifact"
    assert {"fp_ft/loss", "qat/kl", "qat/select_loss"} <= keys
    assert {"coverage/_type", "report/w4a16_g32/_type"} <= keys  # tables: a dict each
    assert any(key.startswith("figures/") for key in keys)
    assert any("group_size" in key or "group_size" in value for key, value in config.items())
    assert artifacts > 0


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
