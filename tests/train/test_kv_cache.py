"""method/kv_cache in fits and in the main job: placed, delayed, logged, checked early, served, in every column."""

import json

import lightning as L
import pytest
import torch

from eval.compare import columns, load_export
from qdeepseek.layers.kv_cache import CacheQuantizer
from qdeepseek.quant.kv_cache import CacheFormat, KVCacheScheme
from qdeepseek.surgery.kv_cache import kv_cache_of
from qdeepseek.train import qat
from qdeepseek.train.callbacks.fake_quant import FakeQuant
from qdeepseek.train.callbacks.kv_cache import KVCacheQuant
from qdeepseek.train.config import ConfigError, OptimConfig
from qdeepseek.train.module import FineTune
from qdeepseek.train.qat import Run
from tests.train.test_callbacks import fit
from tests.train.test_config import composed
from tests.train.test_main_job import SHORT, train


def quantizers(model):
    return [m for m in model.modules() if isinstance(m, CacheQuantizer)]


def test_it_waits_with_the_other_quantisers_and_logs_its_noise(tiny_model):
    callback = KVCacheQuant({"dtype": "int8"}, {"dtype": "fp8"}, log_every=2)
    callback.attach(None, tiny_model)
    tiny_model.gradient_checkpointing_enable({"use_reentrant": False})
    phases, logged = [], []

    class Spy(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            phases.append({q.enabled for q in quantizers(pl_module)})

        def on_train_batch_end(self, trainer, pl_module, *args):
            logged.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("kv_cache")})

    fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 4), [FakeQuant(delay=1), callback, Spy()], steps=4)
    assert len(quantizers(tiny_model)) == 6
    assert phases == [{False}, {True}, {True}, {True}]
    assert [bool(found) for found in logged] == [False, False, True, True]  # at step 2; kept until the next one
    assert 25 < logged[2]["kv_cache/sqnr_db_min"] < 36 < logged[2]["kv_cache/sqnr_db"] < 50
    assert not any(q.observe or q.error is not None for q in quantizers(tiny_model))


def test_another_scheme_cannot_continue_a_checkpoint():
    state = KVCacheQuant({"dtype": "int8"}).state_dict()
    KVCacheQuant({"dtype": "int8"}, log_every=1).load_state_dict(state)
    with pytest.raises(ValueError, match="trained with INT8 per token and head, this run asks for INT4 g32"):
        KVCacheQuant({"dtype": "int4", "group_size": 32}).load_state_dict(state)


def test_wrong_values_are_refused_when_parsed():
    with pytest.raises(ConfigError, match=r"method.kv_cache: .*'bf16' is refused"):
        Run.from_config(composed("run_dir=x", "method/kv_cache=int8", "method.kv_cache.cache.dtype=bf16"))
    with pytest.raises(ConfigError, match=r"method.kv_cache: .*unknown keys \['groups'\]"):
        Run.from_config(composed("run_dir=x", "method/kv_cache=int8", "+method.kv_cache.cache.groups=2"))


def test_a_group_that_does_not_divide_is_refused_before_training(tiny_folder):
    overrides = [f"model.path={tiny_folder}", "run_dir=x", "method/kv_cache=int4"]
    qat.check(Run.from_config(composed(*overrides)))
    with pytest.raises(ValueError, match=r"the latent of model.layers.0.self_attn has 128 elements, not a multiple of"):
        qat.check(Run.from_config(composed(*overrides, "method.kv_cache.cache.group_size=48")))


@pytest.mark.slow
def test_main_job(tmp_path):
    """The shipped model, from load to report; then its folder: what is evaluated is the cache that was trained."""
    folder = tmp_path / "run"
    options = [f"run_dir={folder}", *SHORT, "method/kv_cache=int8", "method.kv_cache.rope={dtype:fp8}",
               "method.kv_cache.log_every=1"]  # fmt: skip
    done = train(*options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bit for bit" in done.stdout
    metrics = json.loads((folder / "metrics.json").read_text())
    (entry,) = metrics["schemes"].values()
    assert all(entry["loss"][column] is not None for column in ("base", "fp_ft", "rtn", "gptq", "qat"))
    assert metrics["facts"]["kv_cache"] == "INT8 per token and head, rope FP8 per token and head"
    curve = "".join(path.read_text() for path in folder.rglob("metrics.csv"))
    assert "kv_cache/sqnr_db" in curve

    export = folder / "export" / "compressed_tensors"
    scheme = KVCacheScheme(CacheFormat("int8"), CacheFormat("fp8"))
    assert kv_cache_of(load_export(export, "float32")) == scheme
    run = Run.from_config(composed(*options))
    made = columns(run, export)
    assert kv_cache_of(made["rtn"]()) == scheme and kv_cache_of(made["base"]()) is None
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert made["qat"]()(ids).logits.isfinite().all()
