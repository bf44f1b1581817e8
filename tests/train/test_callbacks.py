"""Callbacks in real fits of a tiny model: routers are balanced, fake-quant waits, the teacher stays outside."""

import copy
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from qdeepseek.layers import WeightQuantizer
from qdeepseek.surgery import Recipe, prepare
from qdeepseek.train.callbacks.balance import LossFreeBalance
from qdeepseek.train.callbacks.compensation_relative import RelativeCompensation
from qdeepseek.train.callbacks.fake_quant import FakeQuant
from qdeepseek.train.callbacks.precision import on_spikes
from qdeepseek.train.config import ConfigError, OptimConfig
from qdeepseek.train.datamodule import TokenDataModule
from qdeepseek.train.module import FineTune
from qdeepseek.train.optim import parameter_groups
from tests.train.test_config import composed


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def collate(items):
    return {k: torch.stack([i[k] for i in items]) for k in items[0]}


def fit(module, callbacks, steps=3, accumulate=1, **options):
    data = TokenDataModule(Rows(), Rows(), 2, collate, seed=0)
    trainer = L.Trainer(
        max_steps=steps, max_epochs=-1, accumulate_grad_batches=accumulate, callbacks=callbacks, accelerator="cpu",
        devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, **options,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


def test_balance_counts_each_token_once_an_optimizer_step(tiny_model):
    tiny_model.gradient_checkpointing_enable({"use_reentrant": False})  # the recomputed half must not count
    seen, callback = [], LossFreeBalance(speed=2**-20)
    module = FineTune(tiny_model, OptimConfig(lr=1e-4), 2)

    class Spy(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(callback._load_ME.sum(1).tolist())

    fit(module, [Spy(), callback], steps=2, accumulate=2)
    tokens = 2 * 16 * 2  # rows × length × top-2
    assert [s[0] for s in seen] == [0, tokens, 0, tokens]
    for router in callback.routers.values():
        moved = router.e_score_correction_bias
        assert moved.dtype == torch.float32
        assert set((moved * 2**20).round().abs().int().tolist()) <= {0, 1, 2} and bool((moved != 0).any())


def test_routers_stay_in_fp32_when_training_in_bf16(tiny_model):
    gate = tiny_model.model.layers[1].mlp.gate
    gate.e_score_correction_bias.fill_(1.0)
    fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 2), [LossFreeBalance(speed=2**-10)], steps=2, precision="bf16-true")
    assert tiny_model.model.layers[1].self_attn.o_proj.weight.dtype == torch.bfloat16
    assert gate.weight.dtype == torch.float32
    moved = gate.e_score_correction_bias  # 2^-10 below and above 1 do not exist in bf16
    assert moved.dtype == torch.float32 and bool((moved != 1).any()) and bool(((moved - 1).abs() <= 2**-9).all())


def test_balance_resumed_moves_the_bias_once_a_step(tiny_model, tmp_path):
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")
                trainer.should_stop = True

    def biases(*callbacks, resume=None):
        model = copy.deepcopy(tiny_model)
        module = FineTune(model, OptimConfig(lr=1e-4), 4)
        trainer = L.Trainer(
            max_steps=4, accumulate_grad_batches=2, callbacks=[LossFreeBalance(), *callbacks], accelerator="cpu",
            devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, TokenDataModule(Rows(), Rows(), 2, collate), ckpt_path=resume, weights_only=False)
        return [layer.mlp.gate.e_score_correction_bias for layer in model.model.layers[1:]]

    whole = biases()
    biases(Stop())
    assert all(torch.equal(a, b) for a, b in zip(whole, biases(resume=tmp_path / "middle.ckpt"), strict=True))


def test_balance_without_a_router_is_an_error(tiny_model):
    for layer in tiny_model.model.layers[1:]:
        layer.mlp = tiny_model.model.layers[0].mlp
    with pytest.raises(ValueError, match=r"method\.balance.*no router with e_score_correction_bias"):
        fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 2), [LossFreeBalance()])


def test_fake_quant_waits_for_its_step_and_is_on_at_the_end(tiny_model):
    prepare(tiny_model, Recipe.from_config(composed("run_dir=x")["quant"]))
    quantizers = [m for m in tiny_model.modules() if isinstance(m, WeightQuantizer)]
    phases = []

    class Spy(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            phases.append({q.enabled for q in quantizers})

    fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 4), [Spy(), FakeQuant(delay=2, cache=True)], steps=4)
    assert phases == [{False}, {False}, {True}, {True}]
    assert all(q.enabled and not q.cache for q in quantizers)


def test_teacher_is_in_no_parameter_and_no_checkpoint(tiny_model, tiny_config):
    from transformers import DeepseekV3ForCausalLM

    teacher = DeepseekV3ForCausalLM(tiny_config)
    module = FineTune(tiny_model, OptimConfig(lr=1e-4), 2, teacher, 1.0)
    own = {id(p) for p in tiny_model.parameters()}
    assert {id(p) for p in module.parameters()} == own
    assert len(module.state_dict()) == len(tiny_model.state_dict())
    assert module.teacher is teacher


def test_scales_are_a_group_of_their_own(tiny_model):
    prepare(tiny_model, Recipe.from_config(composed("run_dir=x")["quant"]))
    groups = {g["name"]: g for g in parameter_groups(tiny_model, OptimConfig(lr=1.0, scale_lr=0.5, weight_decay=0.1))}
    scales = [m.scale for m in tiny_model.modules() if isinstance(m, WeightQuantizer)]
    assert {id(p) for p in groups["scales"]["params"]} == {id(s) for s in scales}
    assert groups["scales"]["lr"] == 0.5 and groups["scales"]["weight_decay"] == 0
    assert groups["matrices"]["weight_decay"] == 0.1 and groups["vectors"]["weight_decay"] == 0
    total = sum(p.numel() for g in groups.values() for p in g["params"])
    assert total == sum(p.numel() for p in tiny_model.parameters() if p.requires_grad)


def test_resuming_with_another_data_order_is_refused():
    data = TokenDataModule(Rows(), Rows(), 2, collate, seed=0)
    state = {"batches": 4, "first": 0, "world": 1, "batch_size": 4, "seed": 0, "items": 32, "data_hash": ""}
    with pytest.raises(ConfigError, match=r"another data order \(batch_size 4 -> 2\); resume with the same product"):
        data.load_state_dict(state)


@pytest.mark.parametrize("cache", [False, True])
def test_deferred_scale_gradients_train_the_same_scales(tiny_model, cache, monkeypatch):
    recipe = Recipe.from_config(composed("quant=w4a16_g32", "run_dir=x")["quant"])
    found = []
    for defer in (True, False):
        student = copy.deepcopy(tiny_model)
        prepare(student, recipe)
        if not defer:
            monkeypatch.setattr(FakeQuant, "setup", lambda *args, **options: None)
        module = FineTune(student, OptimConfig(lr=1e-4, scale_lr=1e-3, warmup_steps=0), 1)
        fit(module, [FakeQuant(cache=cache)], steps=1, accumulate=2, gradient_clip_val=1.0)
        quantizers = [m for m in student.modules() if isinstance(m, WeightQuantizer)]
        assert not any(q.defer for q in quantizers), "only during the fit"
        found.append(torch.cat([q.scale.detach().flatten() for q in quantizers]))
    start = copy.deepcopy(tiny_model)
    prepare(start, recipe)
    before = torch.cat([m.scale.detach().flatten() for m in start.modules() if isinstance(m, WeightQuantizer)])
    moved = [f - before for f in found]
    assert moved[1].abs().mean() > 1e-5
    # Adam's first step is the sign of the gradient: where that is almost zero, rounding decides it
    same = (moved[0] - moved[1]).abs() <= 1e-2 * moved[1].abs() + 1e-7
    assert same.float().mean() > 0.995, same.float().mean()


def test_sums_over_ranks_have_no_barrier(tiny_model, monkeypatch, tmp_path):
    """Lightning's strategy.reduce begins with a barrier, for which the host waits for the device in every step."""

    def reduce(*args, **kwargs):
        raise AssertionError("strategy.reduce in a step")

    monkeypatch.setattr(SingleDeviceStrategy, "reduce", reduce)
    recipe = Recipe.from_config(composed("run_dir=x")["quant"])
    prepare(tiny_model, recipe)
    precision = on_spikes(warmup=1)
    precision.attach(
        SimpleNamespace(folder=tmp_path, qat_steps=2, wandb=None, method=SimpleNamespace(delay_steps=0)), tiny_model
    )
    fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 2), [LossFreeBalance(), RelativeCompensation(), precision], steps=2)
