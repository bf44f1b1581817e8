"""dequantize(export(model)) == fake_quantize(model), for every scheme, dtype, family and source."""

import errno
import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qdeepseek.export.compressed_tensors import export
from qdeepseek.export.loader import Export, load, load_prepared
from qdeepseek.export.sources import SchemeMismatch, save_quantizers
from qdeepseek.export.verify import verify
from qdeepseek.export.writer import MANIFEST
from qdeepseek.surgery import prepare, quantized_tensors

MAIN = "schemes__main__weight__"
SCHEMES = {
    "g32": ("w4a16_g32", {}),
    "narrow": ("w4a16_g32", {MAIN + "grid": "narrow"}),
    "asymmetric": ("w4a16_g32", {MAIN + "symmetric": False}),
    "channel asymmetric": ("w4a16_g32", {MAIN + "symmetric": False, MAIN + "granularity": "per_channel"}),
    "tensor": ("w4a16_g32", {MAIN + "granularity": "per_tensor"}),
    "tensor asymmetric": ("w4a16_g32", {MAIN + "symmetric": False, MAIN + "granularity": "per_tensor"}),
    "int8": ("w4a16_g32", {MAIN + "bits": 8}),
    "int3 asymmetric": ("w3a16_g32", {MAIN + "symmetric": False}),
    "int2": ("w2a16_g32", {}),
    "fp32 scale": ("w4a16_g32", {MAIN + "scale_dtype": "float32", MAIN + "serve_dtype": None}),
    "exact product": ("w4a16_g32", {MAIN + "serve_dtype": None}),
    "learned": ("w4a16_g32", {"schemes__main__method__learned": True}),
    "learned asymmetric": ("w4a16_g32", {"schemes__main__method__learned": True, MAIN + "symmetric": False}),
    "mse": ("w4a16_g32", {"schemes__main__method__kind": "mse"}),
    "experts only": ("w4_experts_only", {}),
    "mixed": ("mixed", {}),
    "w4a8": ("w4a8", {}),
    "w4a4": ("w4a4", {}),
    "head and embedding": ("w4a8", {"rules__lm_head__scheme": "int8", "rules__embedding__scheme": "weight_only"}),
}  # fmt: skip
quiet = pytest.mark.filterwarnings("ignore:scales are")


def assert_same_codes(a, b):
    for one, two in zip(quantized_tensors(a), quantized_tensors(b), strict=True):
        assert one.name == two.name
        for x, y in zip(one.quantizer.quantize(one.weight), two.quantizer.quantize(two.weight), strict=True):
            assert (x is None and y is None) or (x.dtype == y.dtype and torch.equal(x, y))


@quiet
@pytest.mark.parametrize("scheme", SCHEMES)
def test_round_trip_of_every_scheme(scheme, make_recipe, make_prepared, empty_model, ids, tmp_path):
    name, changes = SCHEMES[scheme]
    recipe = make_recipe(name, **changes)
    model = make_prepared(recipe)
    with torch.no_grad():
        for tensor in quantized_tensors(model):  # trained scales, not those of the initial weights
            if tensor.quantizer.method.learned:
                tensor.quantizer.scale.mul_(torch.rand_like(tensor.quantizer.scale).add_(0.5))
    result = export(model, tmp_path / "e", recipe=recipe, dtype=torch.float32)
    assert result.bytes == sum(file["bytes"] for file in result.manifest["files"].values())
    report = verify(tmp_path / "e", model)
    assert report.ok, str(report)

    loaded = load(empty_model(tmp_path / "e", torch.float32), tmp_path / "e").state_dict()
    quantized = {tensor.name: tensor.quantizer(tensor.weight) for tensor in quantized_tensors(model)}
    for parameter, value in loaded.items():
        assert torch.equal(value, quantized.get(parameter, model.state_dict().get(parameter))), parameter

    again = load_prepared(empty_model(tmp_path / "e", torch.float32), tmp_path / "e")
    assert_same_codes(model, again)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@quiet
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_round_trip_of_low_precision_models(dtype, symmetric, make_recipe, make_prepared, empty_model, ids, tmp_path):
    name = str(dtype).removeprefix("torch.")
    changes = {MAIN + "symmetric": symmetric, MAIN + "scale_dtype": name, MAIN + "serve_dtype": None}
    model = make_prepared(make_recipe(**changes), dtype=dtype)
    export(model, tmp_path / "e", dtype=dtype)
    report = verify(tmp_path / "e", model)
    assert report.ok, str(report)
    again = load_prepared(empty_model(tmp_path / "e", dtype), tmp_path / "e")
    assert_same_codes(model, again)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen2_moe", "qwen3_moe", "mixtral", "llama", "qwen2"])
def test_families_keep_the_names_of_their_checkpoints(
    family, make_recipe, make_model, make_prepared, empty_model, ids, tmp_path
):
    recipe = make_recipe("w4a16_g32", rules__router__match=r"(.*\.)?mlp\.(gate|shared_expert_gate)")
    model = make_prepared(recipe, family)
    export(model, tmp_path / "e", recipe=recipe, dtype=torch.float32)
    report = verify(tmp_path / "e", model)
    assert report.ok, str(report)
    make_model(family).save_pretrained(tmp_path / "original")
    packed = (".weight_packed", ".weight_scale", ".weight_shape")
    ours = load_file(tmp_path / "e" / "model.safetensors")
    names = {next((n.removesuffix(s) + ".weight" for s in packed if n.endswith(s)), n) for n in ours}
    ignore = json.loads((tmp_path / "e" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignore  # tied or not: no weight of its own in a tied checkpoint, but still a Linear
    assert names == set(load_file(tmp_path / "original" / "model.safetensors"))
    again = load_prepared(empty_model(tmp_path / "e", torch.float32), tmp_path / "e")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_contents_of_the_folder(make_recipe, make_prepared, make_model, tmp_path):
    source = tmp_path / "original"
    make_model().save_pretrained(source)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (source / file).write_text("{}")
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    recipe, destination = make_recipe(), tmp_path / "e"
    model = make_prepared(recipe)
    result = export(model, destination, recipe=recipe, source=source, data_hash="abc", max_shard_bytes=20_000)
    files = {path.name for path in destination.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < files and "notes.txt" not in files
    assert json.loads((destination / "generation_config.json").read_text()) == {"temperature": 0.6}
    assert len([name for name in files if name.endswith(".safetensors")]) > 2

    config = json.loads((destination / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["quantization_config"]["ignore"] == ["lm_head", r"re:.*mlp\.gate$"]
    stored = Export(destination)
    dtypes = {name: stored.checkpoint.info(name).dtype for name in stored.kept}
    fp32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert fp32 == {f"model.layers.1.mlp.gate.{leaf}" for leaf in ("weight", "e_score_correction_bias")}
    assert {dtype for name, dtype in dtypes.items() if name not in fp32} == {torch.bfloat16}

    manifest = json.loads((destination / MANIFEST).read_text())
    assert manifest == result.manifest
    assert set(manifest["files"]) == files - {MANIFEST}
    assert manifest["data_hash"] == "abc" and manifest["source_model"] == "original"
    assert manifest["coverage"]["expert_share"] == 1.0
    assert manifest["versions"]["compressed-tensors"] and manifest["tensors"]["lm_head.weight"] is None
    assert manifest["tensors"]["model.layers.1.mlp.experts.gate_up_proj"] == "scheme_0"
    from qdeepseek.surgery import Recipe

    assert Recipe.from_config(manifest["recipe"]) == recipe


def test_same_model_same_bytes_and_replacement(make_prepared, tmp_path):
    model = make_prepared()
    first = export(model, tmp_path / "a").manifest["files"]
    assert export(model, tmp_path / "b").manifest["files"] == first
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    second = export(model, tmp_path / "a").manifest["files"]
    assert second != first and verify(tmp_path / "a", model).ok
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_tensors_the_model_does_not_have_pass_through(make_recipe, make_prepared, make_model, tmp_path):
    """The multi-token-prediction layer (after the last one), partly in FP8, and an old rotary buffer."""
    source = tmp_path / "original"
    make_model().bfloat16().save_pretrained(source)
    original = load_file(source / "model.safetensors")
    torch.manual_seed(1)
    fp8 = torch.randn(64, 64).to(torch.float8_e4m3fn)
    mtp = {
        "model.layers.2.eh_proj.weight": torch.randn(64, 128).bfloat16(),
        "model.layers.2.enorm.weight": torch.randn(64),
        "model.layers.2.mlp.experts.0.up_proj.weight": fp8,
        "model.layers.2.mlp.experts.1.up_proj.weight": torch.randn(32, 64).bfloat16(),
        "model.layers.2.mlp.gate.weight": torch.randn(4, 64),
    }
    factors = {"model.layers.2.mlp.experts.0.up_proj.weight_scale_inv": torch.tensor([[0.5]])}
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4)}
    save_file(original | mtp | factors | old, source / "model.safetensors")

    model = make_prepared()
    result = export(model, tmp_path / "e", source=source)
    assert set(result.manifest["copied_from_source"]) == set(mtp)
    stored = load_file(tmp_path / "e" / "model.safetensors")
    for name, tensor in mtp.items():
        expected = (fp8.float() * 0.5).bfloat16() if tensor.dtype == torch.float8_e4m3fn else tensor
        assert stored[name].dtype == expected.dtype and torch.equal(stored[name], expected)
    assert not set(old) & set(stored) and not set(factors) & set(stored)
    ignore = json.loads((tmp_path / "e" / "config.json").read_text())["quantization_config"]["ignore"]
    assert r"re:^model\.layers\.2\.mlp\.experts\.\d+\.up_proj$" in ignore and "model.layers.2.eh_proj" in ignore
    report = verify(tmp_path / "e", model)
    assert report.ok, str(report)


@quiet
@pytest.mark.parametrize("scheme", ["asymmetric", "learned", "learned asymmetric", "mse", "w4a4", "tensor"])
def test_streamed_from_a_folder_is_the_same_file(scheme, make_recipe, make_model, make_prepared, tmp_path):
    """A skeleton on the meta device, the weights of a sharded folder and the trained scales of a file."""
    name, changes = SCHEMES[scheme]
    recipe = make_recipe(name, **changes)
    model = make_prepared(recipe)
    with torch.no_grad():
        for tensor in quantized_tensors(model):
            if tensor.quantizer.method.learned:
                tensor.quantizer.scale.mul_(1.25)
    expected = export(model, tmp_path / "memory", recipe=recipe).manifest["files"]
    make_model().save_pretrained(tmp_path / "weights", max_shard_size="60KB")
    save_quantizers(model, tmp_path / "scales.safetensors")
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(model.config)
    prepare(skeleton, recipe)
    result = export(
        skeleton, tmp_path / "streamed", recipe=recipe, weights=tmp_path / "weights",
        quantizers=tmp_path / "scales.safetensors",
    )  # fmt: skip
    differ = {name for name, file in result.manifest["files"].items() if file != expected[name]}
    assert not differ
    other = make_recipe(name, **{**changes, MAIN + "bits": 8})
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(model.config)
    prepare(skeleton, other)
    with pytest.raises(SchemeMismatch, match=r"was trained as weight .*'bits': 4.* exported as weight .*'bits': 8"):
        export(skeleton, tmp_path / "x", weights=tmp_path / "weights", quantizers=tmp_path / "scales.safetensors")


def test_untied_head_is_streamed_from_a_tied_folder(make_recipe, make_model, tmp_path):
    recipe = make_recipe("w4a16_g32", untie=True, schemes__int8={"weight": {"bits": 8}}, rules__lm_head__scheme="int8")
    make_model("qwen2").save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    model = make_model("qwen2")
    prepare(model, recipe)
    expected = export(model, tmp_path / "memory", recipe=recipe).manifest["files"]
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(make_model("qwen2").config)
        skeleton.tie_weights()
    prepare(skeleton, recipe)
    streamed = export(skeleton, tmp_path / "streamed", recipe=recipe, weights=tmp_path / "tied").manifest["files"]
    assert streamed["model.safetensors"] == expected["model.safetensors"]
    assert not json.loads((tmp_path / "streamed" / "config.json").read_text())["tie_word_embeddings"]


def test_given_scales_are_exported_as_given(make_prepared, tmp_path):
    """Those of GPTQ: set_scale on weights that are dequantised codes."""
    model = make_prepared()
    for tensor in quantized_tensors(model):
        _, scale, zero = tensor.quantizer.quantize(tensor.weight)
        tensor.quantizer.set_scale(scale * 1.5, zero)
    export(model, tmp_path / "e")
    report = verify(tmp_path / "e", model)
    assert report.ok, str(report)
    packed = Export(tmp_path / "e").read("model.layers.0.self_attn.o_proj")
    assert torch.equal(packed.scale_OG.float(), model.model.layers[0].self_attn.o_proj.weight_quantizer.scale)


def test_another_scheme_than_the_trained_one_is_refused(make_recipe, make_prepared, tmp_path):
    model = make_prepared(make_recipe("w4a16_g32"))
    with pytest.raises(SchemeMismatch, match=r"q_a_proj\.weight was trained as .*bits=4.*recipe 'w3a16_g32' asks for"):
        export(model, tmp_path / "e", recipe=make_recipe("w3a16_g32"))
    with pytest.raises(SchemeMismatch, match="asks for unquantised"):
        export(model, tmp_path / "e", recipe=make_recipe("w4_experts_only"))
    with pytest.raises(SchemeMismatch, match="trained to be served in bfloat16 and would be exported in float16"):
        export(model, tmp_path / "e", dtype=torch.float16)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused(make_model, make_prepared, tmp_path):
    with pytest.raises(ValueError, match=r"no quantised weight; call surgery\.prepare"):
        export(make_model(), tmp_path / "e")
    model = make_prepared()
    with pytest.raises(ValueError, match=r"dtype torch\.int8 is no serving dtype"):
        export(model, tmp_path / "e", dtype=torch.int8)
    model.model.layers[0].mlp.up_proj.weight_quantizer.enabled = False
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight: its quantiser is switched off"):
        export(model, tmp_path / "e")
    meta = make_prepared().to("meta")
    with pytest.raises(ValueError, match="has no data"):
        export(meta, tmp_path / "e")
    make_model("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="is quantised already"):
        export(make_prepared(), tmp_path / "q")
        export(make_prepared(), tmp_path / "e", source=tmp_path / "q")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "q"]


def test_full_disk_leaves_the_earlier_export(make_prepared, tmp_path, monkeypatch):
    model = make_prepared()
    files = export(model, tmp_path / "e").manifest["files"]
    with torch.no_grad():
        model.lm_head.weight.add_(1)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left on the device"):
            export(model, tmp_path / "e")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: os.terminal_size((0, 0)) and type("Usage", (), {"free": 10})())
        with pytest.raises(OSError, match=r"needs 0\.000 GB beside any earlier export"):
            export(model, tmp_path / "e")
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
    assert json.loads((tmp_path / "e" / MANIFEST).read_text())["files"] == files and verify(tmp_path / "e").ok


def test_loader_names_what_does_not_fit(make_prepared, make_model, empty_model, tmp_path):
    model = make_prepared()
    export(model, tmp_path / "e")
    with pytest.raises(ValueError, match="which the model does not have"):
        load(make_model("llama"), tmp_path / "e")
    with pytest.raises(FileNotFoundError, match=f"has no {MANIFEST}"):
        load(make_model(), tmp_path)
    wide = transformers.AutoModelForCausalLM.from_config(
        transformers.DeepseekV3Config(**{**model.config.to_dict(), "n_routed_experts": 6})
    )
    with pytest.raises(ValueError, match=r"the model wants|has no weights for"):
        load(wide, tmp_path / "e")
