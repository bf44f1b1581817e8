"""Planted faults in real fits: what a failed step leaves alone, what is named, restored, reported and resumed."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from qdeepseek.routing.statistics import TOKENS
from qdeepseek.surgery import Recipe, prepare
from qdeepseek.train import qat
from qdeepseek.train.callbacks.balance import LossFreeBalance
from qdeepseek.train.callbacks.compensation_cage import Cage
from qdeepseek.train.callbacks.compensation_seed import SeedCompensation
from qdeepseek.train.callbacks.fake_quant import FakeQuant
from qdeepseek.train.callbacks.guard import Guard, NonFiniteError, step_flags
from qdeepseek.train.callbacks.precision import on_spikes
from qdeepseek.train.callbacks.routing import Routing
from qdeepseek.train.config import ConfigError, OptimConfig
from qdeepseek.train.datamodule import TokenDataModule
from qdeepseek.train.methods import GROUPS
from qdeepseek.train.module import FineTune
from tests.train.test_callbacks import Rows, collate
from tests.train.test_config import composed
from tests.train.test_main_job import SHORT, train

ROOT = Path(__file__).parents[2]
EXPERTS, NORM = "model.layers.1.mlp.experts", "model.layers.1.input_layernorm"


@pytest.fixture
def student(tiny_model):
    prepare(tiny_model, Recipe.from_config(composed("run_dir=x")["quant"]))
    return tiny_model


class Probe(L.Callback):
    """What every optimizer step left: a copy of weights, scales, buffers, moments and step counters."""

    def __init__(self):
        self.after = []

    def record(self, trainer, pl_module):
        moments = [v for s in trainer.optimizers[0].state.values() for v in s.values()]
        tensors = [*pl_module.state_dict().values(), *moments]
        self.after.append([t.clone() for t in tensors])

    def on_train_start(self, trainer, pl_module):
        self.record(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        if (args[-1] + 1) % trainer.accumulate_grad_batches == 0:
            self.record(trainer, pl_module)

    def moved(self, step):
        """Tensors that optimizer step `step` (from 1) changed."""
        before, after = self.after[step - 1], self.after[step]
        return len(after) - len(before) + sum(not torch.equal(a, b) for a, b in zip(before, after, strict=False))


class Plant(L.Callback):
    """Breaks something: `fault(pl_module)` before the forward of optimizer step `step` (from 1)."""

    def __init__(self, step, fault):
        self.step, self.fault = step, fault

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == (self.step - 1) * trainer.accumulate_grad_batches:
            self.fault(pl_module)


def inf_weight(pl_module):
    """Not in a quantised weight with a learned scale: there inf is clamped to the largest code and harms nobody."""
    pl_module.model.get_submodule(NORM).weight.data[3] = torch.inf


def poison(model, module, batches, data, factor=torch.nan):
    """`module` multiplies its output by `factor` whenever the model reads one of these batches of the order."""
    bad = [data.batch(number)["input_ids"] for number in batches]
    reading = [False]

    def read(_, args, kwargs):
        reading[0] = any(torch.equal(kwargs["input_ids"], b) for b in bad)

    model.base_model.register_forward_pre_hook(read, with_kwargs=True)
    model.get_submodule(module).register_forward_hook(lambda _, args, y: y * factor if reading[0] else y)


def data_module():
    return TokenDataModule(Rows(), Rows(), 2, collate, seed=0)


def fit(student, guard, *callbacks, steps=6, accumulate=1, folder=None, data=None, resume=None, distill=0.0, **options):
    module = FineTune(student, OptimConfig(lr=1e-3, warmup_steps=1), steps, student if distill else None, distill)
    trainer = L.Trainer(
        max_steps=steps, max_epochs=-1, accumulate_grad_batches=accumulate, gradient_clip_val=1.0, accelerator="cpu",
        callbacks=[*callbacks, *([guard] if guard else [])], devices=1, logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks), enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(module, data or data_module(), ckpt_path=resume, weights_only=False)
    return trainer


def report(folder):
    return json.loads((Path(folder) / "guard.json").read_text())


def test_the_flags_are_made_without_reading_a_value():
    grads = [torch.ones(3, 4, device="meta"), torch.ones(5, device="meta")]
    assert step_flags(torch.zeros((), device="meta"), grads).shape == (2,)
    for value, norm_bad in ((1.0, 0), (torch.inf, 1), (torch.nan, 1), (3e38, 1)):  # 3e38² overflows in the norm
        assert step_flags(torch.zeros(()), [torch.ones(3), torch.tensor([value, 3e38])]).tolist() == [0, norm_bad or 1]
    assert step_flags(torch.zeros(()), [torch.ones(3), torch.tensor([1.0])]).tolist() == [0, 0]


def test_a_run_without_faults_is_bit_identical_to_one_without_the_guard(student, tiny_config, tmp_path):
    start = {k: v.clone() for k, v in student.state_dict().items()}
    plain, guarded = Probe(), Probe()
    fit(student, None, plain, FakeQuant(cache=True), steps=3, accumulate=2)
    student.load_state_dict(start)
    fit(student, Guard(), guarded, FakeQuant(cache=True), steps=3, accumulate=2, folder=tmp_path)
    for a, b in zip(plain.after, guarded.after, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not (tmp_path / "guard.json").exists()


def test_a_bad_middle_micro_batch_skips_weights_scales_moments_counters_and_bias(student, tmp_path):
    data, guard, probe = data_module(), Guard(), Probe()
    poison(student, f"{EXPERTS}", [4], data)  # step 2 reads batches 3, 4, 5
    with pytest.warns(
        UserWarning, match=r"guard: step 2 had a non-finite loss, first in model\.layers\.1\.mlp\.experts"
    ):
        fit(student, guard, LossFreeBalance(0.01), FakeQuant(cache=True), probe, steps=4, accumulate=3, data=data,
            folder=tmp_path)  # fmt: skip
    assert probe.moved(2) == 0 and all(probe.moved(step) > 50 for step in (1, 3, 4))
    assert (guard.skipped, guard.row, guard.restored_at) == (1, 0, None)
    (event,) = report(tmp_path)["events"]
    assert event == {
        "step": 2, "quantity": "loss", "module": EXPERTS, "where": "forward", "what": "its output", "rank": 0,
        "batch": 4, "raised": False, "action": "skip",
    }  # fmt: skip


def test_a_fault_of_the_backward_raises_the_group(student, tmp_path):
    class Scheduler(L.Callback):
        calls = ()

        def raise_group(self, module_name, step, statistic):
            self.calls = (*self.calls, (module_name, step, statistic))

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.inf

    guard, scheduler, name = Guard(), Scheduler(), "model.layers.2.self_attn.o_proj"
    module = student.get_submodule(name)
    forward = module.forward
    plant = Plant(3, lambda _: setattr(module, "forward", lambda x: forward(Back.apply(x))))
    heal = Plant(4, lambda _: setattr(module, "forward", lambda x: forward(Back.apply(x))))
    compensation = SeedCompensation()
    with pytest.warns(UserWarning, match="step 3 had a non-finite gradient norm"):
        fit(student, guard, scheduler, compensation, plant, heal, steps=4, folder=tmp_path)
    assert scheduler.calls == ((name, 3, torch.inf), (name, 4, torch.inf))  # the second is read at the end of the fit
    assert [e["where"] for e in guard.events] == ["backward"] * 2 and guard.events[0]["raised"]
    assert compensation._counts[0, 0] == 4, "the backward of a replay must not count"


def test_an_inf_in_a_weight_is_restored_and_training_goes_on(student, tmp_path):
    guard, probe = Guard(patience=2), Probe()
    save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    with pytest.warns(UserWarning, match="state of step 2 restored after step 5"):
        fit(student, guard, probe, Plant(4, inf_weight), FakeQuant(cache=True), save, steps=8, folder=tmp_path)
    assert [(e["step"], e["module"], e["where"], e["action"]) for e in guard.events] == [
        (4, NORM, "weight", "skip"), (5, NORM, "weight", "restore"),
    ]  # fmt: skip
    # read at step 6, whose gradient belongs to the broken weights and is dropped: it ends where step 2 ended
    assert all(torch.equal(a, b) for a, b in zip(probe.after[2], probe.after[6], strict=True))
    assert probe.moved(7) > 50 and all(torch.isfinite(t).all() for t in probe.after[8])
    assert report(tmp_path)["restored_to_step"] == 2


def test_what_goes_on_failing_is_restored_once_and_stops_with_a_report(student, tmp_path):
    data = data_module()
    poison(student, "model.layers.0.mlp.down_proj", range(2, 12), data, torch.inf)
    guard = Guard(patience=2)
    with pytest.raises(NonFiniteError) as stopped, pytest.warns(UserWarning):
        fit(student, guard, steps=12, folder=tmp_path, data=data)
    message = str(stopped.value)
    for part in (
        "2 optimizer steps in a row failed (patience 2)", "the state of step 0 was restored after step 4",
        "step 7 had a non-finite loss, first in model.layers.0.mlp.down_proj (forward: its output; rank 0)",
        str(tmp_path / "guard.json"), "trainer.precision",
    ):  # fmt: skip
        assert part in message
    facts = report(tmp_path)
    assert facts["stopped"] == message and [e["action"] for e in facts["events"]] == ["skip", "restore", "skip", "stop"]


def test_without_a_copy_it_stops_at_once(student, tmp_path):
    data = data_module()
    poison(student, "lm_head", range(1, 9), data)
    with pytest.raises(NonFiniteError, match=r"method\.guard\.restore is off.*first in lm_head"), pytest.warns():
        fit(student, Guard(patience=1, restore=False), steps=4, folder=tmp_path, data=data)


def test_a_fault_that_does_not_come_back(student, tmp_path):
    guard, once = Guard(), [0]

    def passing(module, args, output):
        once[0] += 1
        return output * torch.nan if once[0] == 2 else output

    student.model.norm.register_forward_hook(passing)
    with pytest.warns(UserWarning, match="did not show again"):
        fit(student, guard, steps=3, folder=tmp_path)
    assert [e["module"] for e in guard.events] == [None]


def test_a_failed_step_is_run_again_at_the_levels_at_which_it_failed(student, tmp_path):
    """The scheduler, which sees the same failed gradients, raises groups only after the guard has found the module."""
    data, name = data_module(), "model.layers.2.self_attn.o_proj"
    bad, module = data.batch(3)["input_ids"], student.get_submodule(name)
    reading = [False]

    def read(_, args, kwargs):
        reading[0] = torch.equal(kwargs["input_ids"], bad)

    def fails_at_int4(_, args, y):
        return y * torch.nan if reading[0] and module.weight_quantizer.level == "target" else y

    student.base_model.register_forward_pre_hook(read, with_kwargs=True)
    module.register_forward_hook(fails_at_int4)
    own = {"precision": on_spikes(warmup=1, budget=1.0), "guard": Guard()}
    run = SimpleNamespace(folder=tmp_path, qat_steps=20, wandb=None, method=SimpleNamespace(delay_steps=0))
    own["precision"].attach(run, student)
    with pytest.warns(UserWarning, match=rf"step 4 .* first in {name}"):
        fit(student, None, *(own[g] for g in GROUPS if g in own), steps=6, folder=tmp_path, data=data)
    assert own["guard"].events[0]["raised"] and module.weight_quantizer.level == "int8"


@pytest.mark.parametrize("metric", ["adam", "identity"])
def test_cage_pulls_nothing_in_a_skipped_step(student, tmp_path, metric):
    data, probe = data_module(), Probe()
    poison(student, "lm_head", [0, 2], data)  # the first step: Adam has taken none yet
    cage = Cage(strength=1.0, silence=0.0, ramp=False, metric=metric)
    with pytest.warns(UserWarning):
        fit(student, Guard(), cage, probe, FakeQuant(cache=True), steps=3, folder=tmp_path, data=data)
    assert [probe.moved(step) > 50 for step in (2, 3)] == [True, False]
    weights = len(student.state_dict())  # moments appear in the first step, as zeros
    assert all(torch.equal(a, b) for a, b in zip(probe.after[0][:weights], probe.after[1][:weights], strict=True))


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_an_overflow_in_fp16_and_the_scalers_own_back_off(student, tmp_path):
    data, guard, probe, name = data_module(), Guard(), Probe(), "model.layers.0.mlp.down_proj"
    poison(student, name, [3], data, 1e8)  # finite in fp32
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # too high: gradients of the first steps overflow
    with pytest.warns(UserWarning, match="step 4 had a non-finite loss, first in model.layers.0"):
        fit(student, guard, probe, steps=5, folder=tmp_path, data=data,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)])  # fmt: skip
    assert [(e["module"], e["where"]) for e in guard.events] == [(name, "forward")] and guard.row == 0
    moved = [probe.moved(step) > 50 for step in range(1, 6)]
    assert moved.count(False) == guard.backoffs + 1 and not moved[3] and moved[2] and moved[4]
    assert guard.backoffs > 0 and scaler.get_scale() == 2.0 ** (20 - guard.backoffs - 1)
    assert report(tmp_path)["skipped"] == 1


def test_a_norm_that_overflows_is_skipped_under_the_scaler_too(student, tmp_path):
    guard, probe = Guard(), Probe()
    big = Plant(2, lambda _: student.lm_head.weight.register_hook(lambda grad: grad.fill_(2.0**100)))  # 2^200 is inf
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with pytest.warns(UserWarning, match="step 2 had a non-finite gradient norm"):
        fit(student, guard, probe, big, steps=2, folder=tmp_path, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert probe.moved(1) > 50 and probe.moved(2) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("fail", "kill"), [([1], 2), ([1, 2], 3), ("weight", 2)])
def test_resumed_at_any_point_of_it_is_bit_identical(tiny_model, tmp_path, fail, kill):
    """patience 2: one failed step, two that restore; killed before, between and after the late reading of a flag."""
    prepare(tiny_model, Recipe.from_config(composed("run_dir=x")["quant"]))
    start = {k: v.clone() for k, v in tiny_model.state_dict().items()}
    plant = [Plant(2, inf_weight)] if fail == "weight" else []
    poison(tiny_model, EXPERTS, [] if plant else fail, data_module())

    def run(name, steps, resume=None):
        guard, probe = Guard(patience=2), Probe()
        save = ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=1, save_top_k=-1)
        with pytest.warns(UserWarning):
            fit(tiny_model, guard, probe, *plant, save, steps=steps, folder=tmp_path / name, resume=resume)
        return guard, probe.after

    whole, expected = run("whole", 6)
    if len(fail) > 1:  # read at step 4, whose own gradient belongs to other weights and is dropped
        assert all(torch.equal(a, b) for a, b in zip(expected[1], expected[4], strict=True))
    with torch.no_grad():
        for key, value in tiny_model.state_dict().items():
            value.copy_(start[key] * 0)  # all of it must come from the checkpoint
    resumed, found = run("resumed", 6, tmp_path / "whole" / f"step={kill}.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(expected[-1], found[-1], strict=True))
    assert resumed.events == whole.events and len(whole.events) == min(2, len(fail))
    assert (resumed.skipped, resumed.restored_at) == (whole.skipped, whole.restored_at)
    assert (whole.restored_at is None) == (len(fail) == 1)


@pytest.mark.parametrize("mover", [LossFreeBalance, Routing])
def test_routers_stay_where_they_are_in_a_skipped_step(student, tmp_path, mover):
    data, probe = data_module(), Probe()
    poison(student, "model.embed_tokens", [1], data)  # routers see NaN
    parts = {"bias_speed": 0.01, "temperature": {"target": 0.5}} if mover is Routing else {"speed": 0.01}
    callback = mover(**parts, log_every=3)
    with pytest.warns(UserWarning):
        fit(student, Guard(), callback, probe, steps=3, folder=tmp_path, data=data)
    assert probe.moved(2) == 0 and probe.moved(3) > 50
    assert all(torch.isfinite(t).all() for t in probe.after[3])
    if mover is Routing:
        assert torch.isfinite(callback._last).all() and (callback._last[:, TOKENS] == 2 * 2 * 16).all()  # 2 steps


def test_sharded_strategies_are_refused(student, tmp_path):
    module = FineTune(student, OptimConfig(lr=1e-3), 2)
    module.configure_optimizers = lambda: torch.optim.SGD(student.parameters(), lr=0.1)
    trainer = L.Trainer(max_steps=1, accelerator="cpu", devices=1, callbacks=[Guard()], logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    with pytest.raises(ConfigError, match=r"SGD\(fused=False\); .* one device, DDP or ZeRO.*method/guard=off"):
        trainer.fit(module, data_module())


@pytest.mark.slow
def test_two_processes_skip_together_share_the_name_and_restore_from_one_copy(tiny_folder, tmp_path):
    job = Path(__file__).with_name("guard_job.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(job), str(tiny_folder), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert ranks[0]["data"] != ranks[1]["data"]
    for a, b in zip(ranks[0]["after"], ranks[1]["after"], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    after = ranks[0]["after"]
    same = [all(torch.equal(x, y) for x, y in zip(a, b, strict=False)) for a, b in pairwise(after)]
    assert same == [False, True, False, True, False, False, True, False, False]  # step 6 moved by the planted inf
    assert all(torch.equal(x, y) for x, y in zip(after[0], after[8], strict=False))  # restored from rank 0's copy
    events = ranks[1]["events"]
    assert events == ranks[0]["events"] == report(tmp_path)["events"]
    assert [(e["step"], e["module"], e["where"], e["rank"], e["action"]) for e in events] == [
        (2, EXPERTS, "forward", 1, "skip"), (4, None, None, None, "skip"),
        (6, NORM, "weight", 0, "skip"), (7, NORM, "weight", 0, "restore"),
    ]  # fmt: skip


@pytest.mark.slow
def test_one_fault_in_a_distilled_qat_stage(tiny_folder, tmp_path):
    class InQat(Plant):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if pl_module.stage == "qat":
                super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    short = [*SHORT, "trainer.steps=8", "method.guard.patience=1", "trainer.accelerator=cpu"]
    run = qat.Run.from_config(composed(f"model.path={tiny_folder}", f"run_dir={tmp_path}", *short))
    run.callbacks = (InQat(2, inf_weight),)
    qat.fine_tune(run)
    with pytest.warns(UserWarning, match="step 2 had a non-finite loss, first in model.layers.1.input_layernorm"):
        student = qat.quantise_aware(run)
    assert all(torch.isfinite(t).all() for t in student.state_dict().values() if t.is_floating_point())
    assert [e["action"] for e in report(tmp_path)["events"]] == ["restore"]


@pytest.mark.slow
def test_the_program_ends_with_one_readable_line(tiny_folder, tmp_path):
    folder = tmp_path / "run"
    wild = ["trainer.steps=16", "method.guard.patience=1", "qat_optim.lr=1e30"]
    done = train(f"model.path={tiny_folder}", f"run_dir={folder}", *SHORT, *wild)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: method.guard: 1 optimizer steps in a row failed (patience 1), and the state of step")
    assert f"Report: {folder / 'guard.json'}" in last and report(folder)["stopped"] in last
