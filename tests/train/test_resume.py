"""Killed at any point and started again, a run ends with the weights of the unbroken one, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).with_name("resume_job.py")
ROOT = Path(__file__).parents[2]


def run_job(folder: Path, model: Path, data: Path, kill: str = "", *more: str) -> int:
    overrides = [
        f"model.path={model}", "data=sft", f"data.path={data}", "data.max_length=64", "data.batch_size=2",
        "data.too_long=split", "quant=w4a16_g32", "quant.schemes.main.method.learned=true",
        "trainer.steps=8", "trainer.accumulate=2", "trainer.checkpoint_every=1", "trainer.validate_every=3",
        "optim.warmup_steps=3", "qat_optim.warmup_steps=2", "method.delay_steps=2", "method.distill_weight=0.5",
        "method/kv_cache=int8",
        f"run_dir={folder}", f"hydra.run.dir={folder}", *more,
    ]  # fmt: skip
    command = [sys.executable, str(JOB), kill, *overrides]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, -9), done.stderr[-3000:]
    return done.returncode


def assert_same_weights(whole: Path, broken: Path) -> None:
    expected, found = torch.load(whole / "final.pt"), torch.load(broken / "final.pt")
    assert expected.keys() == found.keys()
    assert any("weight_quantizer.scale" in key for key in expected)
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


@pytest.mark.slow
def test_killed_in_warmup_and_mid_accumulation_and_resumed_is_bit_identical(tmp_path, tiny_folder, text_rows):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_job(whole, tiny_folder, text_rows) == 0
    # fp_ft: 16 micro-batches, warm-up ends at 6; qat: 8 micro-batches, fake-quant from 4 on; odd = mid-accumulation
    for kill in ("fp_ft:3", "fp_ft:9", "qat:1", "qat:5"):
        assert run_job(broken, tiny_folder, text_rows, kill) == -9, kill
    assert run_job(broken, tiny_folder, text_rows) == 0
    assert_same_weights(whole, broken)


@pytest.mark.slow
def test_adapters_resume_bit_identically_in_both_stages(tmp_path, tiny_folder, text_rows):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_job(whole, tiny_folder, text_rows, "", "method/lora=default") == 0
    for kill in ("fp_ft:9", "qat:5"):
        assert run_job(broken, tiny_folder, text_rows, kill, "method/lora=default") == -9, kill
    assert run_job(broken, tiny_folder, text_rows, "", "method/lora=default") == 0
    assert_same_weights(whole, broken)
    for name in ("adapter", "adapter_fp_ft"):
        files = [folder / name / "adapter_model.safetensors" for folder in (whole, broken)]
        assert files[0].read_bytes() == files[1].read_bytes()
