"""KV-cache quantisers in models: what is quantised is what a cache holds, nothing else changes, all of it undone."""

import copy

import pytest
import torch
from transformers import DynamicCache

from qdeepseek.layers import kv_cache as layer
from qdeepseek.quant.kv_cache import CacheFormat, KVCacheScheme, fake_quantize_cache
from qdeepseek.surgery import Recipe, prepare, restore
from qdeepseek.surgery.kv_cache import (
    PREFIX,
    attach_kv_cache,
    attention_layers,
    cache_quantizers,
    detach_kv_cache,
    kv_cache_of,
)
from tests.export.conftest import FAMILIES, SMALL, build_model
from tests.surgery.surgery_models import load_recipe, tiny_moe

INT8, INT4, FP8 = CacheFormat("int8"), CacheFormat("int4", 16, symmetric=False), CacheFormat("fp8")
SCHEMES = {
    "int8": KVCacheScheme(INT8), "fp8": KVCacheScheme(FP8), "int4": KVCacheScheme(INT4),
    "int8, rope fp8": KVCacheScheme(INT8, FP8), "int4, rope int8": KVCacheScheme(INT4, INT8),
    "fp8 static": KVCacheScheme(CacheFormat("fp8", static=True), CacheFormat("fp8", static=True)),
}  # fmt: skip
MODELS = ["deepseek_v3", "deepseek_v2", "llama", "qwen2", "qwen3_moe", "mixtral"]


def model_of(family: str, **changes):
    """A random model; GQA families with two query heads a key head."""
    import transformers

    torch.manual_seed(0)
    if family in ("llama", "qwen2"):
        kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
        config = kinds[family](**{**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2})
        return transformers.AutoModelForCausalLM.from_config(config, **changes).eval()
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), **changes).eval()


def tokens(batch=2, length=10):
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def decode(model, ids, cache):
    """Logits of ids fed two tokens first, then one at a time."""
    steps = [ids[:, :2], *ids[:, 2:].split(1, dim=1)]
    return torch.cat([model(step, past_key_values=cache, use_cache=True).logits for step in steps], dim=1)


class QuantizingCache(DynamicCache):
    """What a runtime does: quantises what is written, returns what is stored."""

    def __init__(self, config, first, second):
        super().__init__(config=config)
        self.forms = first, second

    def update(self, key_states, value_states, *args, **kwargs):
        first, second = self.forms
        key = key_states if first is None else fake_quantize_cache(key_states, first)
        value = value_states if second is None else fake_quantize_cache(value_states, second)
        return super().update(key, value, *args, **kwargs)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_it_is_what_a_cache_holds(family, scheme):
    """Bit for bit a plain model that decodes with a cache quantised on writing: the latent and the rope key of MLA,
    rotated keys and values of the others. One forward over all tokens is the same up to the error that plain
    incremental decoding has."""
    plain, ids = model_of(family, dtype=torch.float64), tokens()
    plain.config._experts_implementation = "eager"  # the one that computes in fp64
    mla = family.startswith("deepseek")
    written = QuantizingCache(plain.config, scheme.cache, scheme.rope if mla else scheme.cache)
    expected, reference = decode(plain, ids, written), plain(ids).logits
    plain_error = (decode(plain, ids, DynamicCache(config=plain.config)) - reference).abs().max()

    model = copy.deepcopy(plain)
    assert attach_kv_cache(model, scheme) == 2 and kv_cache_of(model) == scheme
    assert torch.equal(decode(model, ids, DynamicCache(config=model.config)), expected)
    full = model(ids).logits
    assert (full - reference).abs().max() > 1e-5
    one_rounding = torch.finfo(torch.float32).eps  # norms and routers compute in fp32
    assert (full - expected).abs().max() <= max(4 * plain_error, one_rounding)


@torch.no_grad()
def test_latent_and_rope_key_apart():
    """A wrong width, or the rope key where the latent should be, changes these numbers."""
    plain, ids = model_of("deepseek_v3"), tokens()
    results = {}
    for name, scheme in {"latent": KVCacheScheme(INT4), "both": KVCacheScheme(INT4, INT8)}.items():
        model = copy.deepcopy(plain)
        attach_kv_cache(model, scheme)
        names = [name.split("self_attn.")[1] for name, _ in cache_quantizers(model)]
        assert names == ["kv_a_layernorm.cache_quantizer"] * 2 if name == "latent" else len(names) == 4
        results[name] = model(ids).logits
        assert (model.config._attn_implementation == PREFIX + "sdpa") == (name == "both")
    cache = QuantizingCache(plain.config, INT4, None)
    torch.testing.assert_close(results["latent"], decode(plain, ids, cache), rtol=1e-3, atol=1e-5)
    assert not torch.equal(results["latent"], results["both"])


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_gradients_are_straight_through(family):
    """The backward equals autograd through x + (x_hat − x).detach() written into the model's own tensors."""
    scheme = KVCacheScheme(INT8, FP8)
    model, ids = model_of(family), tokens()
    attach_kv_cache(model, scheme)
    model(ids, labels=ids).loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    model = model_of(family)
    attach_kv_cache(model, scheme)
    for _, quantizer in cache_quantizers(model):
        form = quantizer.form
        quantizer.forward = lambda x, form=form: x + (fake_quantize_cache(x, form) - x).detach()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-3, atol=1e-6)
    assert all(g.isfinite().all() for g in found.values())
    assert found[
        "model.layers.0.self_attn." + ("kv_a_proj_with_mqa" if "deep" in family else "k_proj") + ".weight"
    ].any()


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2"])
def test_gradient_checkpointing_changes_nothing(family):
    grads = []
    for checkpointing in (False, True):
        model, ids = model_of(family), tokens()
        attach_kv_cache(model, SCHEMES["int8, rope fp8"])
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert grads[0] and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(family, attention):
    """By position ids, and (sdpa) by the boolean mask of packed chats: each document as if it were alone."""
    model, ids = model_of(family, attn_implementation=attention), tokens(1, 12)
    attach_kv_cache(model, SCHEMES["int8, rope fp8"])
    assert model.config._attn_implementation == PREFIX + attention
    alone = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, alone)
    if attention == "sdpa":
        document = torch.tensor([0] * 5 + [1] * 7)
        mask = (document[:, None] == document) & torch.ones(12, 12, dtype=torch.bool).tril()
        found = model(ids, position_ids=positions, attention_mask=mask[None, None], use_cache=False).logits
        torch.testing.assert_close(found, alone)
    padded = torch.cat([torch.full((1, 3), 2), ids[:, :5]], dim=1)
    kept = torch.tensor([[0] * 3 + [1] * 5])
    shifted = (kept.cumsum(-1) - 1).clamp(min=0)
    found = model(padded, attention_mask=kept, position_ids=shifted).logits[:, 3:]
    torch.testing.assert_close(found, alone[:, :5])


@pytest.mark.parametrize("family", ["deepseek_v3", "llama", "qwen3_moe"])
@torch.no_grad()
def test_undone_by_detach_and_by_restore(family):
    model, ids = model_of(family), tokens()
    before, state = model(ids).logits, list(model.state_dict())
    kinds = [type(m) for m in model.modules()]
    for undo in (detach_kv_cache, restore):
        attach_kv_cache(model, SCHEMES["int8, rope fp8"])
        assert list(model.state_dict()) == state  # no parameter, no buffer
        assert not torch.equal(model(ids).logits, before)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(ids).logits, model(ids).logits)
        undo(twin)
        assert torch.equal(twin(ids).logits, before) and not torch.equal(model(ids).logits, before)
        undo(model)
        assert torch.equal(model(ids).logits, before) and [type(m) for m in model.modules()] == kinds
        assert kv_cache_of(model) is None and model.config._attn_implementation == "sdpa"
        undo(model)  # nothing left to do


@torch.no_grad()
def test_beside_quantised_weights_and_activations():
    """W4A4: kv_b_proj gets the latent as the cache returns it."""
    model, ids = build_model("deepseek_v3"), tokens()
    prepare(model, load_recipe("w4a4"))
    before = model(ids).logits
    attach_kv_cache(model, KVCacheScheme(INT8))
    attention = attention_layers(model)[0][1]
    seen, norm = [], attention.kv_a_layernorm
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attention.kv_b_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert not torch.equal(model(ids).logits, before)
    assert torch.equal(fake_quantize_cache(norm.forward(seen[0]), INT8), seen[1].squeeze(1))
    restore(model)
    assert kv_cache_of(model) is None


def test_switched_off_and_observed():
    quantizer = layer.CacheQuantizer(INT8)
    x = torch.randn(2, 8, 16)
    quantizer.observe = True
    x_hat = quantizer(x)
    noise, signal = quantizer.error
    torch.testing.assert_close(noise, (x_hat - x).square().sum())
    torch.testing.assert_close(signal, x.square().sum())
    quantizer.enabled = False
    assert quantizer(x) is x and "INT8 per token and head, enabled=False" in repr(quantizer)


def test_flash_attention_is_fine_where_only_the_latent_is_quantised():
    model = model_of("deepseek_v3")
    model.config._attn_implementation = "flash_attention_2"
    assert attach_kv_cache(model, SCHEMES["int8"]) == 2
    assert model.config._attn_implementation == "flash_attention_2"
    detach_kv_cache(model)
    with pytest.raises(
        ValueError, match=r"'flash_attention_2' of model.layers.0.self_attn cannot be wrapped; set model.a"
    ):
        attach_kv_cache(model, SCHEMES["int8, rope fp8"])


@pytest.mark.parametrize(
    ("family", "scheme", "message"),
    [
        (
            "deepseek_v3",
            KVCacheScheme(CacheFormat("int4", 24)),
            r"latent of model.layers.0.self_attn has 32 .*group_size 16",
        ),
        ("deepseek_v3", KVCacheScheme(INT8, CacheFormat("int4", 64)), "rope key of model.layers.0.self_attn has 32"),
        ("llama", KVCacheScheme(CacheFormat("int4", 32)), "key or value of model.layers.0.self_attn has 16"),
    ],
)
def test_groups_must_divide(family, scheme, message):
    model = model_of(family)
    with pytest.raises(ValueError, match=message):
        attach_kv_cache(model, scheme)
    assert kv_cache_of(model) is None and not list(cache_quantizers(model))


def test_other_refusals():
    model = model_of("llama")
    model.config._attn_implementation = "paged|eager"
    with pytest.raises(
        ValueError, match=r"'paged\|eager' of .* cannot be wrapped; set model.attention to one of sdpa, fl"
    ):
        attach_kv_cache(model, SCHEMES["int8"])
    model.config._attn_implementation = "sdpa"
    attach_kv_cache(model, SCHEMES["int8"])
    with pytest.raises(ValueError, match="has KV-cache quantisers already"):
        attach_kv_cache(model, SCHEMES["fp8"])
    with pytest.raises(ValueError, match="what DeepseekV4ForCausalLM caches is not known"):
        attach_kv_cache(tiny_moe("deepseek_v4"), SCHEMES["int8"])
    with pytest.raises(ValueError, match=r"what Linear caches is not known \(no module is called self_attn\)"):
        attach_kv_cache(torch.nn.Linear(2, 2), SCHEMES["int8"])

    class SelfAttention(torch.nn.Module):  # of a checkpoint with its own code: no attention interface
        def __init__(self):
            super().__init__()
            self.k_proj, self.v_proj = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.head_dim, self.config = 4, None

    with pytest.raises(ValueError, match="does not use transformers' attention interface"):
        attach_kv_cache(torch.nn.ModuleDict({"self_attn": SelfAttention()}), SCHEMES["int8"])


def test_on_the_meta_device():
    recipe: Recipe = load_recipe("w4a16_g32")
    with torch.device("meta"):
        model = model_of("deepseek_v3", dtype=torch.bfloat16)
    prepare(model, recipe)
    attach_kv_cache(model, SCHEMES["int8, rope fp8"])
    assert model(torch.zeros(1, 4, dtype=torch.long, device="meta")).logits.shape == (1, 4, 96)
