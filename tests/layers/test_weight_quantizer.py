"""WeightQuantizer: export equals forward for every source of the scale; state; the cache."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from qdeepseek.layers import QuantLinear, WeightQuantizer
from qdeepseek.quant import QuantScheme, RangeMethod, dequantize, grid

GRIDS = {"full": {}, "narrow": {"grid": "narrow"}, "asymmetric": {"symmetric": False}}
METHODS = {
    "minmax": RangeMethod(), "percentile": RangeMethod(kind="percentile", percentile=97.0),
    "iqr": RangeMethod(kind="iqr", iqr_factor=1.0), "mse": RangeMethod(kind="mse", mse_grid=8),
    "lsq": RangeMethod(learned=True),
    "lsq-mse-clipped": RangeMethod(kind="mse", mse_grid=8, learned=True, gradient="clipped"),
    "fixed": RangeMethod(),
}  # fmt: skip


def build(scheme, method_name, w, **kwargs):
    quantizer = WeightQuantizer(scheme, METHODS[method_name], w.shape, **kwargs)
    quantizer.initialize(w)
    if method_name == "fixed":
        zero = None if scheme.symmetric else torch.ones(quantizer.scale_shape, dtype=torch.int8)
        quantizer.set_scale(torch.rand(quantizer.scale_shape) * 0.1 + 0.1, zero)
    return quantizer


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("grid_name", GRIDS)
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "per_group"])
def test_export_equals_forward(method, bits, grid_name, granularity):
    variants = (
        (torch.float32, "bfloat16", None), (torch.float32, "float16", "bfloat16"), (torch.bfloat16, "bfloat16", None),
        (torch.float16, "float32", "float16"),
    )  # fmt: skip
    for (dtype, scale_dtype, serve), shape in itertools.product(variants, ((4, 64), (2, 4, 64))):
        scheme = QuantScheme(bits, granularity, 32, scale_dtype=scale_dtype, serve_dtype=serve, **GRIDS[grid_name])
        w = torch.randn(shape).to(dtype)
        quantizer = build(scheme, method, w, row_blocks=2)
        w = (w * 1.25).requires_grad_()  # the weight has moved since
        w_hat = quantizer(w)
        codes, scale, zero = quantizer.quantize(w)
        assert scale.dtype == scheme.torch_scale_dtype and tuple(scale.shape) == quantizer.scale_shape
        assert torch.equal(dequantize(codes, scale, zero, scheme, dtype), w_hat)
        w_hat.backward(torch.ones_like(w_hat))
        assert w.grad.isfinite().all()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_set_scale_returns_the_codes_it_was_given(learned, symmetric, dtype):
    scheme = QuantScheme(group_size=32, symmetric=symmetric)
    quantizer = WeightQuantizer(scheme, RangeMethod(learned=learned), (8, 64))
    codes = torch.randint(-8, 8, (8, 64), dtype=torch.int8)
    scale = (torch.rand(8, 2) + 0.1).to(torch.bfloat16)
    zero = None if symmetric else torch.randint(-8, 8, (8, 2), dtype=torch.int8)
    w = dequantize(codes, scale, zero, scheme, dtype)
    quantizer.set_scale(scale, zero)
    got, got_scale, got_zero = quantizer.quantize(w)
    assert torch.equal(got, codes) and torch.equal(got_scale, scale)
    assert symmetric or torch.equal(got_zero, zero)
    assert torch.equal(quantizer(w), w)


def test_set_scale_refuses_wrong_shape_and_zero():
    quantizer = WeightQuantizer(QuantScheme(group_size=32), RangeMethod(), (8, 64))
    with pytest.raises(ValueError, match=r"\(8, 1\) is not the scale shape \(8, 2\)"):
        quantizer.set_scale(torch.ones(8, 1))
    with pytest.raises(ValueError, match="zero point"):
        quantizer.set_scale(torch.ones(8, 2), torch.zeros(8, 2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_state_dict_restores_the_forward(method, symmetric):
    scheme = QuantScheme(group_size=32, symmetric=symmetric)
    w = torch.randn(8, 64)
    trained = build(scheme, method, w)
    fresh = WeightQuantizer(scheme, METHODS[method], w.shape)
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(w * 2), trained(w * 2))
    assert [*fresh.state_dict()] == [*trained.state_dict()]


def test_disabled_is_the_identity_and_uninitialised_is_loud():
    w = torch.randn(4, 64)
    quantizer = WeightQuantizer(QuantScheme(), RangeMethod(learned=True), w.shape)
    assert quantizer(w).isnan().all()
    quantizer.enabled = False
    assert quantizer(w) is w


def test_shape_errors_name_the_module():
    with pytest.raises(ValueError, match=r"layers\.3\.up"):
        WeightQuantizer(QuantScheme(group_size=128), RangeMethod(), (8, 64), name="layers.3.up")
    with pytest.raises(ValueError, match="7 rows do not split into 2"):
        WeightQuantizer(QuantScheme(), RangeMethod(), (7, 64), row_blocks=2)


def test_casting_a_model_keeps_the_scale_in_fp32():
    w = torch.randn(4, 64)
    quantizer = build(QuantScheme(), "lsq", w)
    before = quantizer.scale.detach().clone()
    parameter = quantizer.scale
    quantizer.bfloat16()
    assert torch.equal(quantizer.scale, before) and quantizer.scale is parameter
    ratio = build(QuantScheme(), "mse", w).half().clip_ratio
    assert ratio.dtype == torch.float32


def test_meta_device_then_materialised():
    quantizer = WeightQuantizer(QuantScheme(), RangeMethod(learned=True), (4, 64), device="meta")
    assert quantizer.scale.is_meta and quantizer(torch.empty(4, 64, device="meta")).is_meta
    w = torch.randn(4, 64)
    quantizer = quantizer.to_empty(device="cpu")
    quantizer.initialize(w)
    assert quantizer(w).isfinite().all()


# --- the cache -------------------------------------------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch):
    """Counts real fake-quantisations of a weight."""
    calls = []
    real = grid.fake_quantize
    monkeypatch.setattr(grid, "fake_quantize", lambda *args: calls.append(1) or real(*args))
    return calls


class Net(nn.Module):
    def __init__(self, method, cache, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        layers = [nn.Linear(64, 64) for _ in range(3)]
        self.layers = nn.ModuleList(
            QuantLinear.from_linear(x, build(QuantScheme(group_size=32), method, x.weight)) for x in layers
        )
        for layer in self.layers:
            layer.weight_quantizer.cache = cache

    def forward(self, x, reentrant=None):
        for layer in self.layers:
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            x = x.tanh()
        return x


def train(method, cache, reentrant=None, optimizer=None, steps=3, accumulate=4):
    net = Net(method, cache)
    optimizer = (optimizer or (lambda p: torch.optim.AdamW(p, 1e-2)))(net.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(accumulate):
            x = torch.randn(5, 64, generator=generator).requires_grad_()
            net(x, reentrant).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize("method", ["minmax", "mse", "lsq", "lsq-mse-clipped", "fixed"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_cache_changes_nothing_and_works_once_a_step(method, reentrant, computed):
    plain = train(method, False, reentrant)
    del computed[:]
    cached = train(method, True, reentrant)
    searches = 8 * 3 if METHODS[method].kind == "mse" else 0
    assert len(computed) == 3 * 3 + searches, "one fake-quant a layer and step"
    for a, b in zip(plain.state_dict().values(), cached.state_dict().values(), strict=True):
        assert torch.equal(a, b)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "single": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_cache_sees_every_optimizer(optimizer):
    plain, cached = (train("lsq", on, None, OPTIMIZERS[optimizer]) for on in (False, True))
    for a, b in zip(plain.state_dict().values(), cached.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def cached_layer(method="minmax"):
    layer = Net(method, True).layers[0]
    layer(torch.randn(2, 64))
    return layer


def test_cache_follows_weight_scale_storage_and_loading(computed):
    layer = cached_layer("lsq")
    quantizer = layer.weight_quantizer
    changes = [
        lambda: layer.weight.detach().mul_(2),
        lambda: quantizer.scale.detach().mul_(2),
        lambda: layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}),
        lambda: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 3)),
        lambda: setattr(layer.weight, "data", layer.weight.data * 3),
        lambda: quantizer.set_scale(quantizer.scale.detach() * 2),
        lambda: layer.double(),
        lambda: (layer.weight.data.mul_(2), quantizer.clear_cache()),
    ]
    for i, change in enumerate(changes):
        quantizer(layer.weight)
        change()
        del computed[:]
        w_hat = quantizer(layer.weight)
        assert len(computed) == 1, f"change {i} was not seen"
        codes, scale, zero = quantizer.quantize(layer.weight)
        assert torch.equal(dequantize(codes, scale, zero, quantizer.scheme, layer.weight.dtype), w_hat)
        quantizer(layer.weight)
        assert len(computed) == 1, "the second call must be cached"


def test_another_parameter_at_the_same_address():
    """Memory is reused: address and version alone do not identify a weight."""
    quantizer = WeightQuantizer(QuantScheme(), RangeMethod(), (4, 64))
    quantizer.cache = True
    values = torch.randn(4, 64)
    first = nn.Parameter(values)
    quantizer(first)
    values.data.mul_(3)
    second = nn.Parameter(values)
    assert (first.data_ptr(), first._version) == (second.data_ptr(), second._version)
    codes, scale, zero = quantizer.quantize(second)
    assert torch.equal(quantizer(second), dequantize(codes, scale, zero, quantizer.scheme))


def test_parametrised_weight_is_never_cached():
    """peft's target_parameters adds LoRA's delta to the parameter through a parametrisation."""

    class Add(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.delta = nn.Parameter(torch.zeros(shape))

        def forward(self, w):
            return w + self.delta

    layer = cached_layer()
    x = torch.randn(2, 64)
    before = layer(x)
    parametrize.register_parametrization(layer, "weight", Add(layer.weight.shape))
    assert torch.equal(layer(x), before)
    delta = layer.parametrizations.weight[0].delta
    with torch.no_grad():
        delta.add_(torch.randn_like(delta))
    assert not torch.equal(layer(x), before)
    assert layer.weight_quantizer._memo is None
    layer(x).sum().backward()
    assert delta.grad.abs().sum() > 0


def test_cache_and_inference_mode():
    layer = Net("minmax", True).layers[0]
    x = torch.randn(2, 64)
    with torch.inference_mode():
        first = layer(x)
    assert layer.weight_quantizer._memo is None, "an inference tensor must not reach training"
    layer(x).sum().backward()
    with torch.inference_mode():
        assert torch.equal(layer(x), first)


def test_cache_is_not_copied_or_pickled():
    layer = cached_layer()
    assert layer.weight_quantizer._memo is not None
    assert copy.deepcopy(layer).weight_quantizer._memo is None
    assert pickle.loads(pickle.dumps(layer)).weight_quantizer._memo is None


def test_switching_the_cache_off_frees_it():
    layer = cached_layer()
    layer.weight_quantizer.cache = False
    layer(torch.randn(2, 64))
    assert layer.weight_quantizer._memo is None


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_deferred_scale_gradient_is_that_of_every_backward(cache, dtype):
    torch.manual_seed(0)
    shape, scheme = (3, 8, 64), QuantScheme(4, "per_group", 32, scale_dtype="float32")
    w = nn.Parameter(torch.randn(shape, dtype=dtype) * 0.1)
    inputs = torch.randn(5, 3, 64, dtype=dtype)
    found = []
    for defer in (False, True):
        quantizer = WeightQuantizer(scheme, RangeMethod("mse", learned=True), shape)
        quantizer.initialize(w)
        quantizer.cache, quantizer.defer = cache, defer
        w.grad = None
        for x in inputs:
            (torch.einsum("ei,eoi->eo", x, quantizer(w)).square().sum()).backward()
            assert (quantizer.scale.grad is None) == defer
        quantizer.set_scale_grad(w)
        found.append((w.grad.clone(), quantizer.scale.grad.clone()))
    (plain_w, plain_s), (deferred_w, deferred_s) = found
    assert torch.equal(plain_w, deferred_w)
    torch.testing.assert_close(deferred_s, plain_s, rtol=1e-5, atol=1e-7)


def test_a_cached_weight_never_outlives_a_change_of_defer():
    shape = (8, 64)
    w = nn.Parameter(torch.randn(shape))
    quantizer = WeightQuantizer(QuantScheme(4, "per_group", 32), RangeMethod("mse", learned=True), shape)
    quantizer.initialize(w)
    quantizer.cache = quantizer.defer = True
    quantizer(w)
    quantizer.defer = False
    quantizer(w).sum().backward()
    assert quantizer.scale.grad is not None
    quantizer.scale.grad = None
    quantizer.set_scale_grad(w)
    assert quantizer.scale.grad is None, "a scale that is not deferred keeps the gradient of its backward"


def test_what_cannot_be_deferred_is_not():
    w = nn.Parameter(torch.randn(8, 64))
    for method in (RangeMethod("mse", learned=True, gradient="clipped"), RangeMethod("mse")):
        quantizer = WeightQuantizer(QuantScheme(4, "per_group", 32), method, (8, 64))
        quantizer.defer = True
        assert not quantizer.defers(w)
    quantizer = WeightQuantizer(QuantScheme(4, "per_group", 32), RangeMethod("mse", learned=True), (8, 64))
    quantizer.defer = True
    assert quantizer.defers(w) and not quantizer.defers(w * 1.0) and not quantizer.defers(w.detach())
