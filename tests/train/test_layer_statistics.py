"""Statistics by layer in real fits, against plain loops; names are few however deep the model is."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from qdeepseek.layers import WeightQuantizer
from qdeepseek.quant.sampled import grid_statistics, sample_groups
from qdeepseek.surgery import Recipe, prepare
from qdeepseek.surgery.prepare import quantized_tensors
from qdeepseek.train.callbacks.fake_quant import FakeQuant
from qdeepseek.train.callbacks.gradient_norm import GradientNorm
from qdeepseek.train.callbacks.layer_statistics import MOST_GROUPS, LayerStatistics
from qdeepseek.train.config import OptimConfig
from qdeepseek.train.datamodule import TokenDataModule
from qdeepseek.train.layer_names import block_names, layer_of
from qdeepseek.train.module import FineTune
from tests.train.test_callbacks import Rows, collate
from tests.train.test_config import composed


class Kept(DummyLogger):
    """Keeps what it is told: (step, metrics)."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def named(self, *starts):
        return [(s, {k: v for k, v in m.items() if k.startswith(starts)}) for s, m in self.rows
                if any(k.startswith(starts) for k in m)]  # fmt: skip


def fit(module, callbacks, steps, accumulate=1, log_every=1, resume=None, validate=0, **options):
    logger = Kept()
    trainer = L.Trainer(
        max_steps=steps, max_epochs=-1, accumulate_grad_batches=accumulate, callbacks=callbacks, accelerator="cpu",
        devices=1, logger=logger, log_every_n_steps=log_every, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=validate, val_check_interval=validate or None,
        check_val_every_n_epoch=None, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    data = TokenDataModule(Rows(), Rows(), 2, collate, seed=0)
    trainer.fit(module, data, ckpt_path=resume, weights_only=False)
    return logger, trainer


def quantised(model):
    prepare(model, Recipe.from_config(composed("run_dir=x")["quant"]))
    return model


def naive_norms(model, batches):
    """Layer -> sqrt(mean over micro-batches of the squared norm of its gradient); and the norm of the mean gradient."""
    squares, total = {}, {}
    scales = {id(m.scale) for m in model.modules() if isinstance(m, WeightQuantizer)}
    module = FineTune(model, OptimConfig(lr=1e-4), 2)
    for batch in batches:
        module.zero_grad()
        module.losses(batch, distill=False)[0].backward()
        for name, p in model.named_parameters():
            total[name] = total.get(name, 0) + p.grad / len(batches)
            if id(p) not in scales:
                layer = next((f"layer_{i}" for i in range(3) if f"layers.{i}." in name), "rest")
                squares[layer] = squares.get(layer, 0) + p.grad.square().sum() / len(batches)
    norm = torch.stack([g.square().sum() for g in total.values()]).sum().sqrt()
    return {layer: square.sqrt().item() for layer, square in squares.items()}, norm.item()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradient_norms_are_those_of_a_plain_backward(tiny_model, accumulate):
    model = quantised(tiny_model)
    reference = copy.deepcopy(model)
    order = TokenDataModule(Rows(), Rows(), 2, collate, seed=0)
    layers, total = naive_norms(reference, [order.batch(i) for i in range(accumulate)])
    module = FineTune(model, OptimConfig(lr=1e-4), 2, stage="qat")
    callbacks = [FakeQuant(), LayerStatistics(every=1), GradientNorm()]
    logger, _ = fit(module, callbacks, 1, accumulate, gradient_clip_val=0.01)
    ((step, found),) = logger.named("gradient_norm/")
    assert step == 0
    assert found == pytest.approx({f"gradient_norm/qat/{layer}": norm for layer, norm in layers.items()}, rel=1e-5)
    ((_, whole),) = logger.named("qat/gradient_norm")
    if accumulate == 1:  # deferred scales get their gradient after the backward, from the accumulated one
        assert whole["qat/gradient_norm"] == pytest.approx(total, rel=1e-5)
    else:
        assert whole["qat/gradient_norm"] == pytest.approx(total, rel=1e-3)


def test_weights_are_seen_as_the_forward_uses_them(tiny_model):
    model = quantised(tiny_model)
    before = {t.name: (t.quantizer.served_scale(t.weight)[0].clone(), t.weight.detach().clone())
              for t in quantized_tensors(model)}  # fmt: skip
    seen = {}

    class Spy(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            if trainer.global_step == 3:  # what the last step's forward meets
                for t in quantized_tensors(model):
                    scale, zero = t.quantizer.served_scale(t.weight)
                    seen[t.name] = (t.weight.detach().clone(), scale.clone(), zero, t.scheme)

    optim = OptimConfig(lr=1e-3, scale_lr=1e-2, warmup_steps=0, schedule="constant")
    module = FineTune(model, optim, 4, stage="qat")
    logger, _ = fit(module, [Spy(), FakeQuant(), LayerStatistics(every=50)], 4)
    (row,) = logger.named("rounding_error/", "codes_at_limits/", "scale_change")
    assert row[0] == 3 and len(row[1]) == 4 * 3
    for layer in range(3):
        chosen = [name for name in seen if f"layers.{layer}." in name]
        size = sum(seen[n][0].numel() for n in chosen)
        limits = error = square = change = largest = 0.0
        for name in chosen:
            w, scale, zero, scheme = seen[name]
            share = w.numel() / size
            parts = grid_statistics(sample_groups(w, scale, zero, MOST_GROUPS), scheme).tolist()
            limits, error, square = limits + share * parts[0], error + share * parts[1], square + share * parts[2]
            stride = -(-scale.numel() // MOST_GROUPS)
            moved = (scale / before[name][0] - 1).abs().flatten()[::stride]
            change, largest = change + share * moved.mean().item(), max(largest, moved.max().item())
        expected = (limits, (error / square) ** 0.5, change, largest)
        names = ("codes_at_limits", "rounding_error", "scale_change", "scale_change_max")
        found = [row[1][f"{name}/qat/layer_{layer}"] for name in names]
        assert found == pytest.approx(expected, rel=1e-4)
        assert change > 0 and limits > 0


def test_start_of_the_scales_outlives_a_checkpoint(tiny_model, tmp_path):
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    def run(callbacks, resume=None):
        model = quantised(copy.deepcopy(tiny_model))
        optim = OptimConfig(lr=1e-3, scale_lr=1e-2, warmup_steps=0, schedule="constant")
        module = FineTune(model, optim, 4, stage="qat")
        return fit(module, [FakeQuant(), LayerStatistics(every=4), *callbacks], 4, resume=resume)[0]

    whole = run([Save()]).named("scale_change", "gradient_norm", "rounding")
    resumed = run([], resume=tmp_path / "middle.ckpt").named("scale_change", "gradient_norm", "rounding")
    assert whole == resumed and len(whole) == 1
    assert whole[0][1]["scale_change/qat/layer_1"] > 0


def test_measured_only_every_so_often_and_only_what_is_quantised(tiny_model):
    calls = []
    module = FineTune(quantised(tiny_model), OptimConfig(lr=1e-4), 8, stage="qat")
    watch = LayerStatistics(every=3)

    class Spy(L.Callback):
        def on_before_backward(self, *args):
            calls.append(len(watch._handles))

    logger, _ = fit(module, [FakeQuant(delay=6), watch, Spy()], 8, log_every=2)
    assert [s for s, _ in logger.named("gradient_norm/")] == [2, 5, 7]
    assert [s for s, _ in logger.named("rounding_error/")] == [7], "fake-quant waits for its step"
    parameters = len(watch._parameters)
    assert [c >= parameters for c in calls] == [False, False, True, False, False, True, False, True]
    assert watch._handles == []


def test_a_replayed_batch_is_no_part_of_the_step(tiny_model):
    def norms(*callbacks):
        module = FineTune(copy.deepcopy(tiny_model), OptimConfig(lr=1e-4), 1, stage="fp_ft")
        return fit(module, [LayerStatistics(every=1), *callbacks], 1)[0].named("gradient_norm/")

    class Replay(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            grads = [None if p.grad is None else p.grad.clone() for p in pl_module.parameters()]
            pl_module.losses(trainer.datamodule.batch(0), distill=False)[0].backward()
            for p, grad in zip(pl_module.parameters(), grads):
                p.grad = grad

    assert norms() == norms(Replay()) and set(norms()[0][1]) == {
        f"gradient_norm/fp_ft/{b}" for b in ("layer_0", "layer_1", "layer_2", "rest")
    }


@pytest.mark.parametrize("layers", [1, 3, 61, 64, 65, 80, 126, 1000])
def test_names_are_bounded(layers):
    names = block_names(layers)
    assert len(names) == layers and len(set(names)) <= 64
    assert layers > 64 or names == [f"layer_{i}" for i in range(layers)]
    for block in set(names):
        members = [i for i, name in enumerate(names) if name == block]
        assert members == list(range(members[0], members[-1] + 1)), "neighbours"
        assert layers <= 64 or block == f"layers_{members[0]}-{members[-1]}"


def test_layer_of_a_name():
    assert layer_of("model.layers.12.mlp.experts.gate_up_proj") == 12
    assert layer_of("model.embed_tokens.weight") is None
