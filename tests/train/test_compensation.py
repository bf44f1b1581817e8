"""Compensation in real fits: accumulation, gradient checkpointing, resuming, logs, two processes, wrong values."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra.errors import InstantiationException
from lightning.pytorch.callbacks import Callback

from qdeepseek.routing.routers import find_routers
from qdeepseek.surgery import Recipe, prepare
from qdeepseek.surgery.prepare import quantized_tensors
from qdeepseek.train import qat
from qdeepseek.train.callbacks.compensation_cage import Cage
from qdeepseek.train.callbacks.compensation_lsq import ScaleGradients
from qdeepseek.train.callbacks.compensation_relative import RelativeCompensation
from qdeepseek.train.callbacks.compensation_seed import SeedCompensation
from qdeepseek.train.callbacks.fake_quant import FakeQuant
from qdeepseek.train.config import ConfigError, OptimConfig
from qdeepseek.train.methods import build_methods
from qdeepseek.train.module import FineTune
from tests.train.test_callbacks import fit
from tests.train.test_config import composed

ROOT = Path(__file__).parents[2]
KINDS = ["seed", "relative", "row", "cage", "lsq"]


def student(model, *overrides):
    prepare(model, Recipe.from_config(composed("run_dir=x", *overrides)["quant"]))
    return model


class Killed(Exception):
    pass


class KillAt(Callback):
    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            raise Killed


def run(folder, kind, *overrides, kill=None):
    """A QAT of 4 steps of 2 micro-batches of the shipped model, as train.py makes it. -> (student, metrics)"""
    config = composed(
        f"run_dir={folder}", f"method/compensation={kind}", "method.start=base", "method.teacher=base",
        "method.qat_fraction=1.0", "trainer.steps=4", "trainer.accumulate=2", "trainer.checkpoint_every=1",
        "trainer.validate_every=4", "trainer.log_every=1", "trainer.threads=1", "trainer.accelerator=cpu",
        "trainer.devices=1", "data=sft", "data.max_length=64", "data.batch_size=2", "data.too_long=split",
        "qat_optim.warmup_steps=0", *overrides,
    )  # fmt: skip
    job = qat.Run.from_config(config)
    spy = Metrics()
    job.callbacks = (spy, *([KillAt(kill)] if kill is not None else []))
    return qat.quantise_aware(job), spy.found


class Metrics(Callback):
    def __init__(self):
        self.found = {}

    def on_train_batch_end(self, trainer, *args):
        self.found |= {k: float(v) for k, v in trainer.callback_metrics.items()}


ACTS = {  # values with which each kind does something within 4 steps
    "seed": ["method.compensation.norm=1e-4"], "relative": ["method.compensation.ratio=0.9"], "row": [],
    "cage": ["method.compensation.strength=500", "method.compensation.silence=0.3"],
    "lsq": ["method.compensation.limit=0.1"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_qat_of_the_shipped_model_killed_and_resumed_is_bit_identical(tmp_path, text_rows, kind):
    options = [f"data.path={text_rows}", "method.compensation.log_every=1", *ACTS[kind]]
    whole, metrics = run(tmp_path / "whole", kind, *options)
    with pytest.raises(Killed):
        run(tmp_path / "broken", kind, *options, kill=5)  # inside the accumulation of the third step
    resumed, _ = run(tmp_path / "broken", kind, *options)
    expected, found = whole.state_dict(), resumed.state_dict()
    assert [k for k in expected if not torch.equal(expected[k], found[k])] == []
    plain, _ = run(tmp_path / "off", "off", f"data.path={text_rows}")
    off = plain.state_dict()
    assert any(not torch.equal(expected[k], off[k]) for k in expected)

    names = {k for k in metrics if k.startswith("compensation/")}
    if kind == "cage":
        assert {"compensation/lambda", "compensation/model.layers.1.mlp.experts.down_proj/error"} <= names
    else:
        weight = "gate_up_proj" if kind == "lsq" else "up_proj"
        assert f"compensation/model.layers.1.mlp.experts.{weight}/fired" in names
        assert all(0 <= metrics[k] <= 1 for k in names if k.endswith("fired"))
        assert max(metrics[k] for k in names if k.endswith("fired")) > 0
        assert all(0 < metrics[k] < 1.5 for k in names if k.endswith("factor"))
    assert len(names) <= 2 * 28  # two a quantised weight or point of the model, never one an expert


@pytest.mark.slow
def test_two_processes_end_with_one_set_of_weights(tmp_path, tiny_folder):
    """Ranks that see different data, with accumulation and checkpointing; every kind in one pair of processes."""
    from tests.train.compensation_job import KINDS as JOBS

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    jobs = []
    for rank in range(2):
        env = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WORLD_SIZE": "2",
            "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
        command = [sys.executable, str(ROOT / "tests/train/compensation_job.py"), str(tiny_folder), str(tmp_path)]
        jobs.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    errors = [job.communicate(timeout=400)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], errors[0][-3000:] + errors[1][-3000:]
    for kind in JOBS:
        first, second = (torch.load(tmp_path / f"{kind}.{rank}.pt") for rank in range(2))
        assert all(torch.equal(p, second["parameters"][n]) for n, p in first["parameters"].items()), kind
        if kind == "relative":
            assert torch.equal(first["state"]["usual"].nan_to_num(), second["state"]["usual"].nan_to_num())
            assert not torch.equal(first["observed"], second["observed"])  # decisions are by each rank's own tokens
            assert bool((first["observed"][:, -1] <= 2).all()) and bool((first["observed"][0, -1] == 2).all())


def test_usual_is_the_mean_of_the_micro_batches_and_in_the_checkpoint(tiny_model):
    callback = RelativeCompensation(decay=0.5)
    seen = []

    class Spy(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step > len(seen):
                seen.append(callback._observed.clone())

    tiny_model.gradient_checkpointing_enable({"use_reentrant": False})
    fit(FineTune(student(tiny_model), OptimConfig(lr=1e-4), 2), [Spy(), callback], steps=2, accumulate=2)
    assert len(seen) == 2 and all(bool((s[0, -1] == 2).all()) for s in seen)  # two backward passes a step, not four
    means = [s[:, :-1] / s[:, -1:] for s in seen]
    both = (seen[0][:, -1] > 0) & (seen[1][:, -1] > 0)
    saved = callback.state_dict()["usual"]
    torch.testing.assert_close(saved[both], 0.5 * means[0][both] + 0.5 * means[1][both])
    other = RelativeCompensation()
    other.load_state_dict({"usual": saved[:3]})
    with pytest.raises(ValueError, match=r"the checkpoint has statistics of shape \(3, 2\), this run of"):
        fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 2), [other], steps=1)


def test_hooks_leave_with_the_fit_and_validation_is_untouched(tiny_model):
    callback = SeedCompensation()
    module = FineTune(student(tiny_model), OptimConfig(lr=1e-4), 1)
    fit(module, [callback], steps=1)
    left = {name for name, m in tiny_model.named_modules() if m._forward_hooks or m._forward_pre_hooks}
    assert left == set(find_routers(tiny_model)), "only what keeps routers in fp32 under autocast"
    assert not any("taps" in m.__dict__ for m in tiny_model.modules())
    assert callback._remove == []


@pytest.mark.parametrize("cache", [False, True])
def test_cage_pulls_once_a_step_by_the_rate_of_that_step(tiny_model, cache):
    """Against a fit without it: after the first step, w = w' - lr * lambda * (w' - Q(w')), w' of plain Adam."""
    models = [student(copy.deepcopy(tiny_model)) for _ in range(2)]
    ends = []
    for model, callbacks in zip(models, ([], [Cage(strength=30.0, silence=0.0, ramp=False)]), strict=True):
        optim = OptimConfig(lr=1e-2, warmup_steps=0, schedule="constant")
        fit(FineTune(model, optim, 1), [FakeQuant(cache=cache), *callbacks], steps=1, accumulate=2)
        ends.append({t.name: t for t in quantized_tensors(model)})
    for name, plain in ends[0].items():
        w = plain.weight.detach()
        expected = w - 0.3 * (w - plain.quantizer(w).detach())
        torch.testing.assert_close(ends[1][name].weight.detach(), expected)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert name in ends[0] or torch.equal(a, b)


def test_cage_is_silent_while_fake_quant_waits(tiny_model):
    ends = []
    for callbacks in ([], [Cage(strength=30.0, silence=0.0)]):
        model = student(copy.deepcopy(tiny_model))
        fit(FineTune(model, OptimConfig(lr=1e-3), 2), [FakeQuant(delay=9), *callbacks], steps=2)
        ends.append(model.state_dict())
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


def test_scale_gradients_are_bounded_before_the_step(tiny_model):
    seen = []

    class Spy(L.Callback):
        def on_before_optimizer_step(self, *args):
            tensors = [t for t in quantized_tensors(tiny_model) if t.quantizer.scale.grad is not None]
            for t in tensors:
                s, w = t.quantizer.scale, t.weight
                size = [x.reshape(*s.shape, -1).norm(dim=-1) for x in (w.grad, w.detach())]
                seen.append(((s.grad.abs() / s.detach().abs()) / (size[0] / size[1])).nan_to_num().max())

    module = FineTune(student(tiny_model), OptimConfig(lr=1e-3), 1)
    fit(module, [Spy(), ScaleGradients(limit=0.5), Spy()], steps=1)
    half = len(seen) // 2
    assert max(seen[:half]) > 1.0 and max(seen[half:]) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("cage", {"metric": "hessian"}, "metric 'hessian' is unknown; use one of adam, identity"),
        ("cage", {"silence": 2}, r"silence 2 must lie in \[0, 1\]"),
        ("lsq", {"limit": 0}, "limit 0 must be positive"),
        ("row", {"up": 2}, r"up 2 must lie in \(-1, 1\)"),
        ("relative", {"decay": 1}, r"decay 1 must lie in \[0, 1\)"),
        ("seed", {"alpha": 1}, "unexpected keyword argument 'alpha'"),
    ],
)
def test_wrong_values_name_the_group(kind, values, message):
    config = composed("run_dir=x", f"method/compensation={kind}")["method"]["compensation"]
    with pytest.raises(ConfigError, match=f"method.compensation.*{message}") as error:
        build_methods({"compensation": {**config, **values}})
    assert not isinstance(error.value, InstantiationException)


def test_what_cannot_work_is_said(tiny_model):
    model = student(tiny_model, "quant.schemes.main.method.learned=false")
    with pytest.raises(ValueError, match="no quantised weight is trained together with a learned scale"):
        fit(FineTune(model, OptimConfig(lr=1e-4), 1), [ScaleGradients()], steps=1)
    for t in quantized_tensors(model):
        t.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="the optimizer trains no quantised weight itself"):
        fit(FineTune(model, OptimConfig(lr=1e-4), 1), [Cage()], steps=1)
