"""Tokens, seconds and FLOP/s of a fit against what its batches say; pauses of the clock."""

import time

import lightning as L
import pytest
import torch

from qdeepseek.train.callbacks.throughput import StepClock, Throughput, process_peak
from qdeepseek.train.config import OptimConfig
from qdeepseek.train.flops import forward_flops, training_flops
from qdeepseek.train.module import FineTune
from tests.train.test_layer_statistics import fit


def test_numbers_of_a_fit_follow_from_its_batches(tiny_model, tiny_config):
    from transformers import DeepseekV3ForCausalLM

    teacher = DeepseekV3ForCausalLM(tiny_config)
    module = FineTune(tiny_model, OptimConfig(lr=1e-4), 5, teacher, 1.0, stage="qat")
    callback = Throughput(peak_tflops=2.0)
    start = time.perf_counter()
    logger, _ = fit(module, [callback], 5, accumulate=2, log_every=2)
    wall = time.perf_counter() - start
    rows = logger.named("throughput/", "memory/")
    assert [step for step, _ in rows] == [1, 3, 4]
    row_tokens, length = 2 * 2 * 16, 16  # two micro-batches of two rows of 16
    assert [m["throughput/qat/tokens"] for _, m in rows] == [2 * row_tokens, 4 * row_tokens, 5 * row_tokens]
    seconds = [n * row_tokens / m["throughput/qat/tokens_per_second"] for n, (_, m) in zip((2, 2, 1), rows)]
    assert 0 < sum(seconds) <= wall
    one = training_flops(tiny_model) + forward_flops(teacher)
    keys = 4 * length * (length + 1) / 2
    for steps, spent, (_, m) in zip((2, 2, 1), seconds, rows):
        tflops = one.of(steps * row_tokens, steps * keys) / spent / 1e12
        assert m["throughput/qat/model_tflops"] == pytest.approx(tflops)
        assert m["throughput/qat/mfu"] == pytest.approx(tflops / 2.0)
        assert 0 < m["throughput/qat/step_seconds_p50"] <= m["throughput/qat/step_seconds_p95"]
        assert 0.01 < m["memory/qat/process_peak_gib"] * 2**30 / process_peak() <= 1
        assert "memory/qat/device_peak_gib" not in m


def test_no_peak_no_mfu(tiny_model):
    module = FineTune(tiny_model, OptimConfig(lr=1e-4), 1, stage="fp_ft")
    ((_, found),) = fit(module, [Throughput()], 1)[0].named("throughput/")
    assert "throughput/fp_ft/model_tflops" in found and "throughput/fp_ft/mfu" not in found


def test_the_clock_leaves_out_its_pauses():
    clock = StepClock(torch.device("cpu"))
    clock.resume()
    time.sleep(0.02)
    clock.step()
    clock.pause()
    time.sleep(0.2)
    clock.pause()
    clock.resume()
    time.sleep(0.02)
    clock.resume()
    time.sleep(0.02)
    clock.step()
    first, second = clock.read()
    assert 0.02 <= first < 0.2 and 0.04 <= second < 0.2
    assert clock.read() == []


def test_validation_and_checkpoints_take_no_step_time(tiny_model, tmp_path):
    class Slow(L.Callback):
        def on_validation_batch_end(self, *args):
            time.sleep(0.3)

        def on_save_checkpoint(self, *args):
            time.sleep(0.3)

        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    module = FineTune(tiny_model, OptimConfig(lr=1e-4), 3, stage="fp_ft")
    logger, _ = fit(module, [Throughput(), Slow()], 3, log_every=3, validate=1)
    ((_, found),) = logger.named("throughput/")
    assert found["throughput/fp_ft/step_seconds_p95"] < 0.3


def test_tokens_go_on_counting_after_a_checkpoint(tiny_model, tmp_path):
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "one.ckpt")

    fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 3), [Throughput(), Save()], 2, log_every=5)
    logger, _ = fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 3), [Throughput()], 3, resume=tmp_path / "one.ckpt")
    assert [m["throughput/train/tokens"] for _, m in logger.named("throughput/")] == [2 * 32, 3 * 32]
