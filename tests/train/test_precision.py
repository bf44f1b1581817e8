"""The precision scheduler in real fits: spikes raise what they should, events survive kills, the export is exact."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qdeepseek.export.loader import Export, load, load_prepared
from qdeepseek.export.verify import verify
from qdeepseek.surgery import Recipe, prepare, quantized_tensors
from qdeepseek.train import qat
from qdeepseek.train.callbacks.precision import on_spikes, progressive
from qdeepseek.train.config import ConfigError, OptimConfig
from qdeepseek.train.events import EventLog, read_events
from qdeepseek.train.module import FineTune
from tests.train.test_callbacks import fit
from tests.train.test_config import composed

JOB = Path(__file__).with_name("precision_job.py")
ROOT = Path(__file__).parents[2]
EXPERTS, OUT = "model.layers.1.mlp.experts", "model.layers.2.self_attn.o_proj"
QUICK = {"warmup": 2, "lock": 3, "calm": 1, "history": 0.9, "raise_at": 50.0, "lower_at": 20.0}


class Burst(L.Callback):
    """Multiplies the gradient of a module's weights at some steps."""

    def __init__(self, at, factor=100.0):
        self.at, self.factor = at, factor  # step -> module names

    def on_after_backward(self, trainer, pl_module):
        for name in self.at.get(trainer.global_step, ()):
            for tensor in quantized_tensors(pl_module.model):
                if tensor.module_name == name:
                    tensor.weight.grad.mul_(self.factor)


class Levels(L.Callback):
    """The level of every quantised module in the forward of every step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append({t.module_name: t.quantizer.level for t in quantized_tensors(pl_module.model)})

    def of(self, name):
        return [step[name] for step in self.seen]


def short(tmp_path, steps, **method):
    values = {"delay_steps": 0, **method}
    return SimpleNamespace(
        folder=tmp_path, qat_steps=steps, wandb=None, method=SimpleNamespace(**values),
        export=SimpleNamespace(dtype=None), model=SimpleNamespace(dtype="float32"),
    )  # fmt: skip


def trained(tmp_path, model, callback, steps, others=(), recipe="w4a16_g32", **options):
    run = short(tmp_path, steps)
    run.recipe = Recipe.from_config(composed(f"quant={recipe}", "run_dir=x")["quant"])
    prepare(model, run.recipe)
    callback.attach(run, model)
    module = FineTune(model, OptimConfig(lr=1e-4, warmup_steps=1), steps)
    fit(module, [callback, *others], steps=steps, **options)
    callback.finish(run, model)
    return run


def test_a_spike_raises_its_group_two_steps_later_and_calm_lowers_it(tiny_model, tmp_path):
    torch.manual_seed(0)
    levels = Levels()
    trained(tmp_path, tiny_model, on_spikes(**QUICK), 14, [Burst({4: [EXPERTS], 5: [OUT]}), levels])
    raised = ["target"] * 6 + ["int8"] * 3 + ["target"] * 5
    assert levels.of(EXPERTS) == raised and levels.of(OUT) == ["target", *raised[:-1]]
    assert sum(level != "target" for step in levels.seen for level in step.values()) == 6
    events = read_events(tmp_path, "precision")
    assert [(e["step"], e["group"], e["from"], e["to"], e["reason"], e["n"]) for e in events] == [
        (5, EXPERTS, "int4", "int8", "spike", 0), (6, OUT, "int4", "int8", "spike", 1),
        (8, EXPERTS, "int8", "int4", "calm", 2), (9, OUT, "int8", "int4", "calm", 3),
    ]  # fmt: skip
    assert events[0]["statistic"] > 1000


def test_under_accumulation_and_checkpointing(tiny_model, tmp_path):
    tiny_model.gradient_checkpointing_enable({"use_reentrant": False})
    levels = Levels()
    callback = on_spikes(**QUICK, finalize="keep")
    trained(tmp_path, tiny_model, callback, 8, [Burst({4: [EXPERTS]}), levels], accumulate=2)
    assert levels.of(EXPERTS) == ["target"] * 12 + ["int8"] * 4


def test_a_non_finite_gradient_and_a_guard_raise_and_the_end_lowers(tiny_model, tmp_path):
    torch.manual_seed(0)
    answers = []

    class Guard(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 2:
                answers.append(callback.raise_group(f"model.{OUT}.weight_quantizer", 2, math.nan))
                answers.append(callback.raise_group("model.layers.0.input_layernorm", 2, math.nan))

    class Skip(L.Callback):  # as a guard does: the step must not happen
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.nan_to_num_(0.0)

    levels = Levels()
    callback = on_spikes(**{**QUICK, "warmup": 1, "lock": 100})
    trained(tmp_path, tiny_model, callback, 9, [Burst({4: [EXPERTS]}, math.inf), Guard(), Skip(), levels])
    assert answers == [True, False]
    assert levels.of(OUT) == ["target"] * 2 + ["int8"] * 5 + ["target"] * 2  # the last fifth: two whole steps
    assert levels.of(EXPERTS) == ["target"] * 6 + ["int8"] + ["target"] * 2
    events = read_events(tmp_path, "precision")
    assert [(e["reason"], e["statistic"]) for e in events[:2]] == [("request", None), ("non-finite", None)]
    assert {(e["reason"], e["to"], e["step"]) for e in events[2:]} == {("end", "int4", 6)} and len(events) == 4


def test_progressive_lowering_starts_high_and_finds_scales_anew(tiny_model, tmp_path):
    levels, loud = Levels(), []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            for t in quantized_tensors(pl_module.model):
                loud.append(bool(t.quantizer(t.weight).isfinite().all()))

    callback = progressive(start="bf16", warmup=2)
    trained(tmp_path, tiny_model, callback, 20, [levels, Watch()], recipe="w4a8")
    assert set(levels.seen[0].values()) == {"bf16"} and set(levels.seen[-3].values()) == {"target"}
    counts = [sum(level == "target" for level in step.values()) for step in levels.seen]
    assert counts == sorted(counts) and len(set(counts)) > 5 and all(loud)
    events = read_events(tmp_path, "precision")
    assert len(events) == 2 * len(callback.groups) and {e["from"] for e in events} == {"bf16", "int8"}


def test_what_cannot_work_is_said_before_the_fit(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"method\.precision: unknown key nonsense; known keys are raise_at"):
        on_spikes(nonsense=1)
    quant = "quant.schemes.main.weight.serve_dtype=null"
    run = qat.Run.from_config(composed("run_dir=x", quant, "export.dtype=bfloat16", "method.delay_steps=3"))
    with pytest.raises(ConfigError, match=r"set method\.delay_steps 3 to 0"):
        progressive(warmup=2).check(run, None)
    with pytest.raises(ConfigError, match=r"rule experts has .* in float32 and exported in bfloat16; set serve_dtype"):
        on_spikes(finalize="keep").check(run, None)
    on_spikes().check(run, None)
    run = short(tmp_path, 30)
    prepare(tiny_model, Recipe.from_config(composed("run_dir=x")["quant"]))
    for t in quantized_tensors(tiny_model):
        t.weight.requires_grad_("o_proj" not in t.name)
    callback = on_spikes()
    callback.attach(run, tiny_model)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn\.o_proj is not trained \(LoRA\?\)"):
        fit(FineTune(tiny_model, OptimConfig(lr=1e-4), 2), [callback])


def test_event_log_rewinds_to_the_checkpoint(tmp_path):
    log, other = EventLog(tmp_path, "precision"), EventLog(tmp_path, "guard")
    for step in range(3):
        log.append(step=step, statistic=math.inf)
        other.append(step=step)
    with log.file.open("a") as stream:
        stream.write('{"kind": "precision", "n": 3, "st')  # a kill in the middle of a line
    log.rewind(2)
    assert [e["n"] for e in read_events(tmp_path, "precision")] == [0, 1]
    assert len(read_events(tmp_path, "guard")) == 3
    assert log.append(step=9, statistic=1.0) == {"kind": "precision", "n": 2, "step": 9, "statistic": 1.0}
    assert read_events(tmp_path, "precision")[0]["statistic"] is None
    assert read_events(tmp_path / "none", "precision") == []


# --- a whole run ---------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


class KillAt(L.Callback):
    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            raise Killed


def make_run(folder, model, data, *overrides, callbacks=()):
    run = qat.Run.from_config(composed(
        f"run_dir={folder}", f"model.path={model}", "data=sft", f"data.path={data}", "data.max_length=64",
        "data.batch_size=2", "data.too_long=split", "trainer.steps=24", "trainer.checkpoint_every=1",
        "trainer.accelerator=cpu", "trainer.validate_every=100", "trainer.accumulate=2", "method.start=base",
        "method.distill_weight=0", "qat_optim.warmup_steps=2", "method/precision=scheduler",
        "method.precision.warmup=2", "method.precision.calm=1", "method.precision.log_every=1",
        "method.qat_fraction=0.5", *overrides,
    ))  # fmt: skip
    run.callbacks = tuple(callbacks)
    return run


LIVELY = ["method.precision.raise_at=3", "method.precision.lower_at=2", "method.precision.lock=2",
          "method.precision.settle=1", "method.precision.history=0.8"]  # fmt: skip


@pytest.mark.slow
def test_killed_anywhere_and_resumed_takes_the_same_decisions(tmp_path, tiny_folder, text_rows):
    spikes = Burst({2: [EXPERTS], 3: [OUT], 4: ["model.layers.0.mlp.down_proj"], 5: [OUT, EXPERTS]}, 10.0)

    def run(name, kill=None):
        callbacks = [spikes] if kill is None else [spikes, KillAt(kill)]
        made = make_run(tmp_path / name, tiny_folder, text_rows, *LIVELY, callbacks=callbacks)
        return made, qat.quantise_aware(made)

    whole, expected = run("whole")
    for batch in (1, 7, 12, 13, 20):  # 13: the first after a resume, in the middle of an accumulation
        with pytest.raises(Killed):
            run("broken", batch)
    broken, found = run("broken")
    events = (whole.folder / "events.jsonl").read_text()
    assert (broken.folder / "events.jsonl").read_text() == events
    lines = [json.loads(line) for line in events.splitlines()]
    assert len(lines) > 5 and [e["n"] for e in lines] == list(range(len(lines)))
    assert {"spike", "calm", "end"} <= {e["reason"] for e in lines}
    states = [{k: torch.as_tensor(v) for k, v in m.state_dict().items()} for m in (expected, found)]
    assert states[0].keys() == states[1].keys()
    assert [k for k in states[0] if not torch.equal(states[0][k], states[1][k])] == []
    a, b = (m.methods["precision"].scheduler.state_dict() for m in (whole, broken))
    assert a == b


@pytest.mark.parametrize("quant", ["w4a16_g32", "w4a4"])
def test_finalize_keep_exports_the_map_that_stands(tmp_path, text_rows, quant):
    """The shipped model; experts of a layer spike once, two attention groups twice."""
    spikes = {4: [EXPERTS, OUT, "model.layers.0.self_attn.q_a_proj"], 6: [OUT], 7: [OUT]}
    keep = ["method.precision.finalize=keep", "method.precision.lock=100", "method.precision.raise_at=50",
            f"quant={quant}", "method.precision.settle=1"]  # fmt: skip
    levels = Levels()
    run = make_run(tmp_path / "run", "tiny", text_rows, *keep, callbacks=[Burst(spikes), levels])
    student = qat.quantise_aware(run)
    assert levels.of(EXPERTS)[-1] == "int8" and levels.of(OUT)[-1] == "bf16"

    folder = qat.export_student(run, student)
    proof = verify(folder, student)
    assert proof.ok, str(proof)
    export = Export(folder)
    formats = export.manifest.formats
    assert formats[f"{OUT}.weight"] is None and formats[f"{EXPERTS}.gate_up_proj"].weight.bits == 8
    assert formats["model.layers.2.mlp.experts.gate_up_proj"].weight.bits == 4
    fused = [formats[f"model.layers.0.self_attn.{p}.weight"].weight.bits for p in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert fused == [8, 8]
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert OUT in config["ignore"]
    assert sorted({group["weights"]["num_bits"] for group in config["config_groups"].values()}) == [4, 8]
    rows = {(r["part"], r["scheme"][:2]) for r in export.manifest.raw["coverage"]["rows"]}
    assert {("routed_experts", "W8"), ("routed_experts", "W4"), ("attention", "ke")} <= rows
    assert export.manifest.raw["recipe"]["name"] == f"{quant}_raised"

    ids = torch.randint(3, 250, (2, 32), generator=torch.Generator().manual_seed(1))
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    for fill in (load, load_prepared):
        if fill is load and quant == "w4a4":  # a plain model does not quantise inputs
            continue
        reloaded = fill(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder).eval()
        with torch.no_grad():
            assert torch.equal(reloaded(ids).logits, student(ids).logits)


@pytest.mark.slow
def test_two_processes_with_different_data_and_gradients_decide_the_same(tmp_path, tiny_folder, text_rows):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path), str(tiny_folder), str(text_rows)], env=env, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1))
    assert first["batches"] != second["batches"] and first["own"] != second["own"], "ranks must see different things"
    assert first["scheduler"] == second["scheduler"] and first["levels"] == second["levels"]
    events = read_events(tmp_path, "precision")
    assert len(events) == first["events"] == second["events"] > 5
    assert any(level != "target" for step in first["levels"] for level in step.values())
