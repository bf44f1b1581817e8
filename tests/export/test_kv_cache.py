"""The trained KV cache of an export: in the manifest always, in config.json where runtimes understand it, read back."""

import json

import pytest
import torch
import transformers

from qdeepseek.export import manifest
from qdeepseek.export.compressed_tensors import export
from qdeepseek.export.loader import load, load_prepared
from qdeepseek.export.quantization_config import kv_cache_arguments
from qdeepseek.export.verify import verify
from qdeepseek.export.writer import MANIFEST
from qdeepseek.quant.kv_cache import CacheFormat, KVCacheScheme
from qdeepseek.surgery.kv_cache import attach_kv_cache, kv_cache_of

STATIC = CacheFormat("fp8", static=True)
SCHEMES = {
    "int8": KVCacheScheme(CacheFormat("int8")),
    "int4": KVCacheScheme(CacheFormat("int4", 16, False, scale_dtype="float16"), CacheFormat("fp8")),
    "fp8 static": KVCacheScheme(STATIC, STATIC),
}


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_round_trip(scheme, family, make_recipe, make_prepared, empty_model, ids, tmp_path):
    recipe = make_recipe()
    model = make_prepared(recipe, family)
    attach_kv_cache(model, scheme)
    folder = export(model, tmp_path / "e", recipe=recipe, dtype=torch.float32).folder
    report = verify(folder, model)
    assert report.ok, report
    assert manifest.read(folder).kv_cache == scheme
    config = json.loads((folder / "config.json").read_text())
    assert "qdeepseek_kv" not in json.dumps(config)
    assert (config["quantization_config"]["kv_cache_scheme"] is not None) == scheme.cache.static

    back = load_prepared(empty_model(folder, torch.float32), folder)
    assert kv_cache_of(back) == scheme
    with torch.no_grad():
        assert torch.equal(back(ids).logits, model(ids).logits)
        assert not torch.equal(load(empty_model(folder, torch.float32), folder)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2"])
@pytest.mark.filterwarnings("ignore")
def test_plain_transformers_loads_it_with_a_cache_in_16_bits(
    scheme, family, make_recipe, make_prepared, empty_model, ids, tmp_path
):
    model = make_prepared(make_recipe(), family)
    attach_kv_cache(model, scheme)
    folder = export(model, tmp_path / "e").folder
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        ours = load(empty_model(folder, torch.bfloat16), folder)(ids).logits
        assert torch.equal(theirs(ids).logits, ours)


def test_what_config_json_says():
    """compressed-tensors' parser takes it; it is the one form that vLLM, SGLang and TensorRT-LLM know."""
    from compressed_tensors.quantization import QuantizationArgs

    found = kv_cache_arguments(SCHEMES["fp8 static"], latent=True)
    args = QuantizationArgs(**found)
    assert (args.num_bits, args.type, args.strategy, args.symmetric, args.dynamic) == (
        8,
        "float",
        "tensor",
        True,
        False,
    )
    assert found == kv_cache_arguments(KVCacheScheme(STATIC), latent=False)
    assert kv_cache_arguments(KVCacheScheme(STATIC), latent=True) is None  # one scale for latent and rope key
    assert kv_cache_arguments(SCHEMES["int8"], latent=False) is kv_cache_arguments(None, latent=True) is None


def test_verify_sees_another_cache(make_recipe, make_prepared, tmp_path):
    model = make_prepared(make_recipe())
    attach_kv_cache(model, SCHEMES["fp8 static"])
    folder = export(model, tmp_path / "e", dtype=torch.float32).folder
    other = make_prepared(make_recipe())
    assert any("KV cache is None, the manifest says" in p for p in verify(folder, other).problems)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = None
    path.write_text(json.dumps(config))
    assert any("kv_cache_scheme None, the manifest wants" in p for p in verify(folder).problems)


def test_a_manifest_from_before_has_a_cache_in_16_bits(make_recipe, make_prepared, tmp_path):
    folder = export(make_prepared(make_recipe()), tmp_path / "e", dtype=torch.float32).folder
    content = json.loads((folder / MANIFEST).read_text())
    assert content.pop("kv_cache") is None
    (folder / MANIFEST).write_text(json.dumps(content))
    assert manifest.read(folder).kv_cache is None and verify(folder).ok
