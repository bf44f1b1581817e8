"""LoRA-QAT: what is trained, merged, exported and saved is one weight, bit for bit."""

import copy
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from qdeepseek.export.compressed_tensors import export
from qdeepseek.export.loader import load
from qdeepseek.export.verify import verify
from qdeepseek.layers import WeightQuantizer
from qdeepseek.surgery import Recipe, prepare, quantized_tensors
from qdeepseek.train import adapters, methods, qat
from qdeepseek.train.callbacks.branch import SaveBranch
from qdeepseek.train.callbacks.lora import LoRA
from qdeepseek.train.config import ConfigError, MethodConfig, OptimConfig
from qdeepseek.train.module import FineTune
from tests.train.test_callbacks import fit
from tests.train.test_config import composed

OPTIM = OptimConfig(lr=1e-4, scale_lr=1e-4, warmup_steps=0, schedule="constant")


def a_run(folder: Path, **method) -> SimpleNamespace:
    return SimpleNamespace(
        folder=folder, unquantised=folder, device=torch.device("cpu"), rotates=False,
        model=SimpleNamespace(path="the/base"), methods={}, method=MethodConfig(**{"start": "base", **method}),
    )  # fmt: skip


def quantised(model: nn.Module, learned: bool = True) -> nn.Module:
    overrides = ["quant.schemes.main.method.learned=true"] if learned else []
    prepare(model, Recipe.from_config(composed("run_dir=x", *overrides)["quant"]))
    return model


def trained(model, lora, run, steps=3, **options):
    """The student after a few steps, adapters in place."""
    lora.attach(run, model)
    fit(FineTune(model, lora.optim(OPTIM), steps, stage="qat"), [lora], steps=steps, **options)
    return model


def forward_weights(model, ids, context=None) -> dict[str, torch.Tensor]:
    """Parameter name -> the quantised weight that a forward computes with."""
    seen, names = {}, {t.quantizer: t.name for t in quantized_tensors(model)}
    handles = [q.register_forward_hook(lambda q, _, out: seen.update({names[q]: out.detach()})) for q in names]
    with torch.no_grad(), context or torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.fixture
def ids():
    return torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:scales are")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_merged_export_is_the_trained_forward(tiny_model, ids, tmp_path, precision):
    run, lora = a_run(tmp_path), LoRA(rank=4, lr=1e-2)
    student = trained(quantised(tiny_model), lora, run, precision=precision).eval()
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else None
    expected = forward_weights(student, ids, autocast)
    plain = copy.deepcopy(student)
    adapters.remove(plain)
    lora.finish(run, student)

    dtype = student.model.layers[0].mlp.down_proj.weight.dtype
    export(student, tmp_path / "export", dtype=dtype)
    report = verify(tmp_path / "export", student)
    assert report.ok, str(report)
    served = load(type(student)(student.config).to(dtype), tmp_path / "export").state_dict()
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= set(expected)
    assert [name for name, w_hat in expected.items() if not torch.equal(served[name].to(w_hat.dtype), w_hat)] == []

    export(plain, tmp_path / "plain", dtype=dtype)  # the same scales, without the adapter
    without = load(type(student)(student.config).to(dtype), tmp_path / "plain").state_dict()
    assert all(not torch.equal(without[name].to(w_hat.dtype), w_hat) for name, w_hat in expected.items())


def test_unmerged_model_is_not_exported(tiny_model, tmp_path):
    adapters.inject(quantised(tiny_model), None, 2, 4)
    with pytest.raises(ValueError, match=r"lora_A.* belongs to an adapter; merge it"):
        export(tiny_model, tmp_path / "export")


def test_names_and_parameters_are_the_models_own(tiny_model, tmp_path):
    run, lora = a_run(tmp_path), LoRA(rank=2)
    quantised(tiny_model)
    before = {name: (id(p), p.shape) for name, p in tiny_model.named_parameters()}
    tensors = [t.name for t in quantized_tensors(tiny_model)]
    lora.attach(run, tiny_model)
    assert [t.name for t in quantized_tensors(tiny_model)] == tensors
    assert len(adapters.adapters(tiny_model)) == len(tensors)  # this recipe quantises what takes an adapter
    lora.finish(run, tiny_model)
    assert {name: (id(p), p.shape) for name, p in tiny_model.named_parameters()} == before
    assert all(isinstance(t.weight, nn.Parameter) for t in quantized_tensors(tiny_model))
    assert not hasattr(tiny_model, "peft_config") and not adapters.adapters(tiny_model)


@pytest.mark.parametrize("scales", [True, False])
def test_only_adapters_and_scales_are_trained(tiny_model, tmp_path, scales):
    lora = LoRA(rank=2, lr=1e-2, scales=scales)
    quantised(tiny_model)
    names = {id(p): name for name, p in tiny_model.named_parameters()}
    lora.attach(a_run(tmp_path), tiny_model)
    before = {name: p.detach().clone() for name, p in tiny_model.named_parameters()}
    trainer = fit(FineTune(tiny_model, lora.optim(OPTIM), 2), [lora], steps=2)
    groups = {g["name"]: g for g in trainer.optimizers[0].param_groups}
    found = {id(p): g["name"] for g in groups.values() for p in g["params"]}
    expected = {id(p): "matrices" for w in adapters.adapters(tiny_model) for p in w.parameters() if id(p) not in names}
    if scales:
        expected |= {id(m.scale): "scales" for m in tiny_model.modules() if isinstance(m, WeightQuantizer)}
    assert found == expected and groups["matrices"]["lr"] == 1e-2
    assert len(trainer.optimizers[0].state) == len(expected)
    moved = {name for name, p in tiny_model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in tiny_model.named_parameters() if id(p) in expected}


def test_recompute_and_gradient_checkpointing_change_no_gradient(tiny_model, ids):
    model = quantised(tiny_model).train()
    wrappers = adapters.inject(model, None, 2, 4)
    for wrapper in wrappers:
        nn.init.normal_(wrapper.lora_B[adapters.NAME].weight, std=0.02)

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    expected = gradients()
    assert all(grad is not None and bool((grad != 0).any()) for grad in expected.values())
    for wrapper in wrappers:
        wrapper.recompute = True
    recomputed = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    both = gradients()
    assert all(torch.equal(recomputed[n], g) and torch.equal(both[n], g) for n, g in expected.items())


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_keeps_no_adapted_weight_until_the_backward(tiny_model, ids, monkeypatch, recompute):
    model, made, adapted = quantised(tiny_model).train(), [], adapters.AdaptedParameter.adapted

    def recorded(self):
        w = adapted(self)
        made.append(StorageWeakRef(w.untyped_storage()))
        return w

    monkeypatch.setattr(adapters.AdaptedParameter, "adapted", recorded)
    wrappers = adapters.inject(model, None, 2, 4)
    for wrapper in wrappers:
        wrapper.recompute = recompute
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert [w.expired() for w in made] == [recompute] * len(wrappers)
    loss.backward()
    assert len(made) == len(wrappers) * (1 + recompute)


def test_cache_of_quantised_weights_is_never_stale(tiny_model, ids, tmp_path):
    student = trained(quantised(tiny_model), LoRA(rank=2, lr=1e-2), a_run(tmp_path), steps=1)
    for module in student.modules():
        if isinstance(module, WeightQuantizer):
            module.cache = True
    first = forward_weights(student, ids)
    with torch.no_grad():
        for wrapper in adapters.adapters(student):
            wrapper.lora_B[adapters.NAME].weight.mul_(-20)
    second = forward_weights(student, ids)
    assert all(not torch.equal(first[name], second[name]) for name in first)


def test_folder_is_an_ordinary_peft_adapter(tiny_model, ids, tmp_path):
    base, run, lora = copy.deepcopy(tiny_model), a_run(tmp_path), LoRA(rank=4, lr=1e-2)
    student = trained(tiny_model, lora, run)  # unquantised, so that plain peft computes the same
    own = {name: p.detach().clone() for name, p in student.named_parameters() if "lora_" in name}
    lora.finish(run, student)

    folder = tmp_path / "adapter_fp_ft"
    assert sorted(f.name for f in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), folder)
    assert loaded.peft_config["default"].base_model_name_or_path == "the/base"
    found = {n.removeprefix("base_model.model."): p for n, p in loaded.named_parameters() if "lora_" in n}
    assert found.keys() == own.keys() and all(torch.equal(found[n], own[n]) for n in own)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, student(ids).logits, rtol=1e-4, atol=1e-5)

    adapters.inject(base, None, 4, lora.alpha)  # and back into our own
    adapters.load(base, folder)
    assert all(torch.equal(p, own[n]) for n, p in base.named_parameters() if n in own)


def test_continuing_an_adapter_of_plain_peft(tiny_model, tmp_path):
    """An ordinary `target_modules` adapter: scales are found from its W', and training goes on from it."""
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_b_proj", "o_proj"], init_lora_weights=False)
    plain = get_peft_model(copy.deepcopy(tiny_model), config)
    plain.save_pretrained(tmp_path / "plain")
    merged = plain.merge_and_unload()
    lora = LoRA(rank=2, alpha=4, targets=["q_b_proj", "o_proj"], adapter=str(tmp_path / "plain"))
    run = a_run(tmp_path)
    lora.check(run, tiny_model)
    lora.attach(run, quantised(tiny_model))
    scales = {t.name: t.quantizer.scale for t in quantized_tensors(tiny_model)}
    for tensor in quantized_tensors(quantised(merged)):
        torch.testing.assert_close(scales[tensor.name], tensor.quantizer.scale, rtol=1e-5, atol=0)


def test_branch_is_saved_merged_and_training_goes_on_unchanged(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    class Tokenizer:
        def save_pretrained(self, folder):
            pass

    other, weights = copy.deepcopy(tiny_model), {}
    for model, callbacks in (
        (tiny_model, [SaveBranch(2, tmp_path / "branch", Tokenizer())]),
        (other, []),
    ):
        torch.manual_seed(0)
        lora = LoRA(rank=2, lr=1e-2)
        lora.attach(a_run(tmp_path), model)
        fit(FineTune(model, lora.optim(OPTIM), 3, stage="fp_ft"), [lora, *callbacks], steps=3)
        weights[len(callbacks)] = {n: p.detach() for n, p in model.named_parameters()}
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][n], p) for n, p in weights[1].items())
    saved, info = AutoModelForCausalLM.from_pretrained(tmp_path / "branch", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    again, lora = AutoModelForCausalLM.from_config(tiny_model.config), LoRA(rank=2, lr=1e-2)
    again.load_state_dict({n.replace(".base_layer", ""): p for n, p in weights[0].items() if "lora_" not in n}, False)
    torch.manual_seed(0)
    lora.attach(a_run(tmp_path), again)
    fit(FineTune(again, lora.optim(OPTIM), 2), [lora], steps=2)
    adapters.merge(again)
    state = again.state_dict()
    assert all(torch.equal(state[n], p) for n, p in saved.state_dict().items())


def test_targets(tiny_model):
    everything = adapters.targets_of(tiny_model, None)
    parts = adapters.targets_of(tiny_model, ["attention", "mlp", "shared_experts", "routed_experts"])
    assert everything == parts and not [n for n in everything if ".gate." in n or "norm" in n or "embed" in n]
    assert {n.rpartition(".")[2] for n in adapters.targets_of(tiny_model, ["routed_experts"])} == {
        "gate_up_proj", "down_proj",
    }  # fmt: skip
    one = adapters.targets_of(tiny_model, ["layers.1.self_attn.o_proj"])
    assert one == ["model.layers.1.self_attn.o_proj.weight"]
    (wrapper,) = adapters.inject(tiny_model, ["layers.1.self_attn.o_proj"], 2, 4)
    assert wrapper is tiny_model.model.layers[1].self_attn.o_proj


@pytest.mark.parametrize("target", ["q_prj", "gate", "embed_tokens", "lm_head", "norm"])
def test_wrong_targets_are_refused_before_training(tmp_path, target):
    config = composed("run_dir=x", "method/lora=default", f"method.lora.targets=[{target}]", f"run_dir={tmp_path}")
    with pytest.raises(ConfigError, match=rf"method\.lora\.targets: '{target}' means nothing .*of attention, mlp"):
        qat.check(qat.Run.from_config(config))


@pytest.mark.parametrize("choice", ["compensation=cage", "compensation=lsq", "precision=scheduler"])
def test_methods_that_need_the_weights_gradients_are_refused_before_training(tmp_path, choice):
    run = qat.Run.from_config(composed("method/lora=default", f"method/{choice}", f"run_dir={tmp_path}"))
    with pytest.raises(ConfigError, match=f"method.{choice.split('=')[0]} works with the gradients of .*freezes; set"):
        methods.check({"lora": run.methods["lora"]}, run, run.load("base"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dropout": 0.1}, "dropout 0.1: adapters are added to the weight .*set it to 0"),
        ({"rank": 0}, "rank 0.*must be positive"),
        ({"stages": "fp_ft"}, "stages 'fp_ft' is unknown; use one of both, qat"),
        ({"targets": "attention"}, "targets 'attention' must be a list"),
        ({"targets": []}, "must be a list"),
        ({"r": 8}, "method.lora.*'r'"),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        methods.build_methods({"lora": {"_target_": "qdeepseek.train.callbacks.lora.LoRA", **values}})


def test_an_adapter_that_does_not_fit_is_refused(tiny_model, tmp_path):
    adapters.inject(tiny_model, ["attention"], 2, 4)
    adapters.save(tiny_model, tmp_path / "adapter", "base")
    adapters.remove(tiny_model)
    folder = str(tmp_path / "adapter")
    run = a_run(tmp_path)
    for lora, where, message in (
        (LoRA(rank=2, alpha=4, adapter="no/such"), run, "no adapter_config.json"),
        (LoRA(rank=4, alpha=4, adapter=folder), run, "its rank is 2, method.lora.rank is 4"),
        (LoRA(rank=2, alpha=2, adapter=folder), run, "its alpha is 4"),
        (LoRA(rank=2, alpha=4, adapter=folder), a_run(tmp_path, start="branch"), "set method.start=base"),
        (LoRA(rank=2, alpha=4, adapter=folder), a_run(tmp_path, rounding="gptq"), "set method.rounding=nearest"),
        (LoRA(rank=2, alpha=4, adapter=folder), run, "tensors and of method.lora.targets differ, first"),
    ):
        with pytest.raises(ConfigError, match=message):
            lora.check(where, tiny_model)


def test_adapters_stay_fp32_in_bf16_and_their_size_is_logged(tiny_model, tmp_path):
    lora, logged = LoRA(rank=2, log_every=1), {}

    class Spy(L.Callback):
        def on_train_end(self, trainer, pl_module):
            logged.update(trainer.callback_metrics)

    lora.attach(a_run(tmp_path), quantised(tiny_model))
    fit(FineTune(tiny_model, lora.optim(OPTIM), 2), [lora, Spy()], steps=2, precision="bf16-true")
    for wrapper in adapters.adapters(tiny_model):
        assert wrapper.get_param().dtype == torch.bfloat16
        assert {p.dtype for f in (wrapper.lora_A, wrapper.lora_B) for p in f.parameters()} == {torch.float32}
    assert 0 < logged["lora/delta_mean"] <= logged["lora/delta_max"] < 1


def test_saved_tensors_are_named_as_peft_names_them(tiny_model, tmp_path):
    adapters.inject(tiny_model, ["routed_experts"], 2, 4)
    adapters.save(tiny_model, tmp_path / "adapter", "base")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    first = "base_model.model.model.layers.1.mlp.experts"
    assert {n for n in names if n.startswith(first)} == {
        f"{first}.{path}lora_{x}.weight" for path in ("", "base_layer.") for x in "AB"
    }
