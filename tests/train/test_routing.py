"""The routing callback in real fits: what is recorded, what moves, what is saved, and what is refused."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM

from qdeepseek.routing.routers import find_routers
from qdeepseek.routing.statistics import NAMES
from qdeepseek.train import methods
from qdeepseek.train.callbacks.routing import Routing
from qdeepseek.train.config import ConfigError, OptimConfig
from qdeepseek.train.datamodule import TokenDataModule
from qdeepseek.train.module import FineTune
from qdeepseek.train.qat import Run
from tests.train import routing_job
from tests.train.test_callbacks import Rows, collate, fit
from tests.train.test_config import composed

TOKENS = 2 * 16  # of a micro-batch of tests.train.test_callbacks
ON = {"entropy": {"weight": 1.0}, "gradient": {}}


class Gradients(L.Callback):
    """Router gradients of every optimizer step."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append([m.weight.grad.clone() for m in find_routers(pl_module).values()])


def teacher_of(model):
    teacher = copy.deepcopy(model).eval()
    with torch.no_grad():
        for router in find_routers(teacher).values():
            router.weight += 0.02 * torch.randn_like(router.weight)
    return teacher


def run(model, steps=2, accumulate=1, teacher=None, spies=(), **options):
    callback, spy = Routing(**options), Gradients()
    module = FineTune(model, OptimConfig(lr=1e-3), steps, teacher, 0.5 if teacher is not None else 0.0)
    fit(module, [callback, spy, *spies], steps=steps, accumulate=accumulate)
    return callback, spy.seen


def test_gradient_checkpointing_changes_neither_gradients_nor_counts(tiny_model):
    plain, remat = tiny_model, copy.deepcopy(tiny_model)
    remat.gradient_checkpointing_enable({"use_reentrant": False})
    a, expected = run(plain, accumulate=2, **ON)
    b, found = run(remat, accumulate=2, **ON)
    for one, two in zip(expected, found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    assert a.facts() == b.facts()
    (interval,) = a.facts()["intervals"]
    assert interval["tokens"] == 2 * 2 * TOKENS and interval["step"] == 2
    untouched = run(copy.deepcopy(tiny_model), accumulate=2)[1]
    assert not torch.equal(expected[0][0], untouched[0][0])


def test_the_repeated_forward_of_gradient_checkpointing_is_not_recorded(tiny_model):
    rows = []

    class Counted(Routing):
        def _limit_logits(self, row, logits_TE):
            rows.append(row)

    tiny_model.gradient_checkpointing_enable({"use_reentrant": False})
    fit(FineTune(tiny_model, OptimConfig(lr=1e-3), 1), [Counted(**ON)], steps=1, accumulate=2)
    assert rows == [0, 1] * 2


def test_statistics_alone_leave_training_as_it_is(tiny_model):
    module = FineTune(copy.deepcopy(tiny_model), OptimConfig(lr=1e-3), 2)
    spy = Gradients()
    fit(module, [spy], steps=2)
    _, seen = run(tiny_model)
    assert all(torch.equal(x, y) for one, two in zip(spy.seen, seen, strict=True) for x, y in zip(one, two))


def test_loss_is_that_of_the_formula(tiny_model):
    values = []

    class Spy(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            with torch.no_grad(), callback._taps[0].record():
                callback._taps[0].on_logits = None
                pl_module.model(batch["input_ids"])
            callback._taps[0].on_logits = callback._limit_logits
            total = 0.0
            for logits, _ in callback._taps[0].outputs.values():
                p = logits.double().sigmoid()
                mean = (p / p.sum(-1, keepdim=True)).mean(0)
                total += float((mean * mean.log()).sum())
            values.append([total])

        def on_train_batch_end(self, trainer, pl_module, *args):
            values[-1].append(float(trainer.callback_metrics["train/routing"]))

    callback = Routing(entropy={"weight": 0.5})
    fit(FineTune(tiny_model, OptimConfig(lr=1e-3), 2), [callback, Spy()], steps=2)
    assert [v[1] for v in values] == pytest.approx([0.5 * v[0] for v in values], rel=1e-6)


def test_entropy_revives_the_experts_of_a_collapsed_router(tiny_model):
    for router in find_routers(tiny_model).values():
        torch.nn.init.normal_(router.weight, std=0.05)
    collapsed = copy.deepcopy(tiny_model)
    push, _ = run(collapsed, steps=30, entropy={"weight": 1.0}, log_every=10)
    free, _ = run(tiny_model, steps=30, log_every=10)
    last = [c.facts()["intervals"][-1]["load_entropy_normalised"] for c in (push, free)]
    assert all(a > b for a, b in zip(*last))


def test_limits_hold_in_the_backward(tiny_model):
    for router in find_routers(tiny_model).values():
        torch.nn.init.normal_(router.weight, std=0.05)
    limited, seen = run(copy.deepcopy(tiny_model), steps=1, gradient={"max_norm": 1e-7, "max_logit": None})
    free, others = run(tiny_model, steps=1)
    assert limited.facts()["intervals"][0]["gradient_clipped"][0] > 0.5
    assert 0 < float(seen[0][0].norm()) < 0.1 * float(others[0][0].norm())
    assert free.facts()["intervals"][0]["gradient_clipped"] == [0, 0]


def test_teacher_is_compared_and_pulled_to(tiny_model):
    with torch.no_grad():
        for router in find_routers(tiny_model).values():
            torch.nn.init.normal_(router.weight, std=0.05)
    teacher = teacher_of(tiny_model)
    same, _ = run(copy.deepcopy(tiny_model), steps=1, teacher=copy.deepcopy(tiny_model))
    assert same.facts()["intervals"][0]["topk_changed"] == [0, 0]
    assert same.facts()["load"]["teacher"] == same.facts()["load"]["qat"]
    free, _ = run(copy.deepcopy(tiny_model), steps=30, teacher=teacher, log_every=10)
    held, _ = run(copy.deepcopy(tiny_model), steps=30, teacher=teacher, log_every=10, kl_weight=10.0)
    changed = [sum(c.facts()["intervals"][-1]["topk_changed"]) for c in (free, held)]
    assert 0 < changed[1] < changed[0]
    none, _ = run(tiny_model, steps=1)
    assert none.facts()["intervals"][0]["topk_changed"] == [None, None] and set(none.facts()["load"]) == {"qat"}


def test_bias_moves_by_its_speed_against_the_load_once_a_step(tiny_model):
    callback, _ = run(tiny_model, steps=3, accumulate=2, bias_speed=2**-10)
    for router in callback.routers.values():
        bias = router.e_score_correction_bias
        assert bias.dtype == torch.float32
        assert set((bias * 2**10).abs().int().tolist()) <= {0, 1, 2, 3} and bool(bias.any())


def test_bias_survives_bf16_training_saving_and_export(tiny_model, tmp_path):
    from qdeepseek.export.compressed_tensors import export
    from qdeepseek.export.loader import load_prepared
    from qdeepseek.surgery import Recipe, prepare

    for router in find_routers(tiny_model).values():
        router.e_score_correction_bias.fill_(1.0)
    recipe = Recipe.from_config(composed("run_dir=x")["quant"])
    prepare(tiny_model, recipe)
    callback = Routing(bias_speed=2**-10)  # 1 ± 2^-10 does not exist in bf16
    fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 2), [callback], steps=2, precision="bf16-true")
    biases = [r.e_score_correction_bias for r in find_routers(tiny_model).values()]
    assert all(b.dtype == torch.float32 and bool((b != 1).any()) for b in biases)
    export(tiny_model, tmp_path / "e", recipe=recipe, dtype=torch.bfloat16)
    again = AutoModelForCausalLM.from_config(tiny_model.config, dtype=torch.bfloat16)
    load_prepared(again, tmp_path / "e")
    loaded = [r.e_score_correction_bias for r in find_routers(again).values()]
    assert all(torch.equal(a, b.float()) for a, b in zip(biases, loaded, strict=True))
    assert all(b.dtype == torch.float32 for b in loaded)


def test_temperature_is_in_the_weight(tiny_model):
    frozen = OptimConfig(lr=1e-30, warmup_steps=0)
    before = [r.weight.detach().clone() for r in find_routers(tiny_model).values()]
    callback = Routing(temperature={"target": 0.01, "speed": 0.25})
    fit(FineTune(tiny_model, frozen, 2), [callback], steps=2)
    for old, router, log_tau in zip(before, callback.routers.values(), callback._log_tau):
        assert float(log_tau) == -0.5  # undecided tokens: colder, two steps
        torch.testing.assert_close(router.weight, old * torch.tensor(0.5).exp(), rtol=1e-5, atol=0)


def test_frozen_routers_do_not_move_and_thaw_afterwards(tiny_model):
    config = Run.from_config(composed("run_dir=x", "method/routing=frozen"))
    callback = config.methods["routing"]
    methods.attach(config.methods, config, tiny_model)
    before = {n: r.weight.clone() for n, r in find_routers(tiny_model).items()}
    assert not any(r.weight.requires_grad for r in find_routers(tiny_model).values())
    fit(FineTune(tiny_model, OptimConfig(lr=1e-2), 2), [callback], steps=2)
    config.folder = type("Nowhere", (), {"__truediv__": lambda self, name: Target})()
    methods.finish(config.methods, config, tiny_model)
    assert all(torch.equal(before[n], r.weight) for n, r in find_routers(tiny_model).items())
    assert all(r.weight.requires_grad for r in find_routers(tiny_model).values())


class Target:
    text = ""

    @classmethod
    def write_text(cls, text):
        cls.text = text


def test_logged_names_are_bounded_by_layers(tiny_model):
    names = set()

    class Spy(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            names.update(trainer.callback_metrics)

    run(tiny_model, steps=2, spies=[Spy()], log_every=1, **ON)
    layers = {n for n in names if n.startswith("routing/layer_")}
    assert layers == {f"routing/layer_{i}/{n}" for i in (1, 2) for n in NAMES if n != "topk_changed"}
    assert "routing/lambda" in names


def test_packed_padding_is_not_counted(tiny_model):
    from qdeepseek.data.packing import PackedDataset, collate_packed
    from tests.data.test_sequence_packing import PAD, document

    data = PackedDataset([document(9, s) for s in range(8)], length=16, pad_token_id=PAD)
    callback = Routing(**ON)
    trainer = L.Trainer(
        max_steps=1, callbacks=[callback], accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(FineTune(tiny_model, OptimConfig(lr=1e-3), 1), TokenDataModule(data, data, 4, collate_packed))
    assert callback.facts()["intervals"][0]["tokens"] == 4 * 9


def test_resumed_fit_is_bit_identical(tiny_model, tmp_path):
    options = {
        "entropy": {"weight": 0.5, "target": 0.99, "decay": "linear"}, "gradient": {}, "bias_speed": 1e-3,
        "entropy_and_bias": True, "temperature": {"target": 0.9}, "log_every": 3,
    }  # fmt: skip
    teacher = teacher_of(tiny_model)

    def trained(model, stop, resume=None):
        callback = Routing(**options, kl_weight=0.1)
        trainer = L.Trainer(
            max_steps=6, callbacks=[callback, *([Stop(stop)] if stop else [])], accelerator="cpu", devices=1,
            accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        module = FineTune(model, OptimConfig(lr=1e-3), 6, copy.deepcopy(teacher), 0.5)
        trainer.fit(module, TokenDataModule(Rows(), Rows(), 2, collate), ckpt_path=resume, weights_only=False)
        return model, callback, trainer

    class Stop(L.Callback):
        def __init__(self, step):
            self.step = step

        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == self.step:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")
                trainer.should_stop = True

    whole, expected, _ = trained(copy.deepcopy(tiny_model), 0)
    trained(copy.deepcopy(tiny_model), 4)
    resumed, found, _ = trained(copy.deepcopy(tiny_model), 0, tmp_path / "middle.ckpt")
    assert [n for n, a in whole.state_dict().items() if not torch.equal(a, resumed.state_dict()[n])] == []
    assert torch.equal(expected._log_tau, found._log_tau) and bool(found._log_tau.any())
    assert expected.facts() == found.facts()


# ---- configuration


@pytest.mark.parametrize("choice", ["entropy", "bias", "frozen", "kl", "observe"])
def test_every_choice_composes(choice):
    run = Run.from_config(composed("run_dir=x", f"method/routing={choice}"))
    assert isinstance(run.methods["routing"], Routing)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method/routing=entropy", "method.routing.bias_speed=0.1"], r"bias_speed 0\.1 both.*entropy_and_bias=true"),
        (["method/routing=entropy", "method.routing.entropy.scope=rank"], r"routing\.entropy: scope 'rank' is unknown"),
        (["method/routing=entropy", "+method.routing.entropy.speed=1"], r"unknown key speed; known keys are weight"),
        (["method/routing=entropy", "+method.routing.frozen=true"], "frozen=true leaves"),
        (["method/routing=kl", "method.routing.kl_weight=-1"], "must not be negative"),
    ],
)  # fmt: skip
def test_wrong_configurations_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        Run.from_config(composed("run_dir=x", *overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method/routing=kl", "method.distill_weight=0"], r"kl_weight 0\.1 compares with the teacher"),
        (["method/routing=entropy", "trainer.precision=16-mixed"], r"use bf16-mixed, or max_norm=null"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_before_training(overrides, message, tiny_model):
    run = Run.from_config(composed("run_dir=x", *overrides))
    with pytest.raises(ConfigError, match=message):
        methods.check(run.methods, run, tiny_model)


def test_what_does_not_fit_the_model_is_refused_before_training(tiny_model):
    run = Run.from_config(composed("run_dir=x", "method/routing=bias"))
    for router in find_routers(tiny_model).values():
        del router.e_score_correction_bias
    with pytest.raises(ConfigError, match=r"has no e_score_correction_bias; use method/routing=entropy"):
        methods.check(run.methods, run, tiny_model)
    with pytest.raises(ConfigError, match="the model has no router"):
        methods.check(run.methods, run, tiny_model.model.layers[0])


# ---- two processes


@pytest.mark.slow
def test_two_processes_compute_what_one_computes_on_the_union(tiny_model, tmp_path):
    for router in find_routers(tiny_model).values():
        torch.nn.init.normal_(router.weight, std=0.05)
    tiny_model.save_pretrained(tmp_path / "model")
    job = Path(__file__).with_name("routing_job.py")
    env = {**os.environ, "PYTHONPATH": str(job.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(job), str(tmp_path / "model"), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"rank{r}.pt") for r in (0, 1))
    union = routing_job.train(tmp_path / "model", 1, "global")
    whole = {**one["global"], **two["global"]}
    for rank in (one["global"], two["global"]):
        assert all(torch.equal(a, b) for a, b in zip(rank["biases"], union["biases"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(rank["weights"], whole["weights"], strict=True))
        torch.testing.assert_close(rank["weights"], union["weights"])
        for name, expected in union["gradients"].items():
            torch.testing.assert_close(rank["gradients"][name], expected, rtol=1e-4, atol=1e-7, msg=name)
        (found,), (all_of_it,) = rank["facts"]["intervals"], union["facts"]["intervals"]
        for key in all_of_it:
            assert found[key] == pytest.approx(all_of_it[key], abs=1e-6), key
        assert rank["facts"]["load"] == union["facts"]["load"]
    assert 0 < union["facts"]["intervals"][0]["gradient_clipped"][0] < 1
    gate = next(n for n in union["gradients"] if n.endswith("gate.weight"))
    assert not torch.allclose(one["local"]["gradients"][gate], union["gradients"][gate], rtol=1e-3, atol=1e-7)
