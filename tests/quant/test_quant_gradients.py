"""Every autograd.Function against autograd through the readable composition, in float64; and what it saves."""

import itertools
import math

import pytest
import torch

from qdeepseek.quant import QuantScheme, RangeMethod, fake_quantize_activation, fake_quantize_weight
from qdeepseek.quant.grid import scale_bounds

SCHEMES = [
    QuantScheme(bits=bits, granularity=granularity, group_size=32, scale_dtype=scale_dtype, **grid)
    for bits, granularity, scale_dtype, grid in itertools.product(
        (2, 4, 8), ("per_tensor", "per_channel", "per_group"), ("bfloat16", "float32"),
        ({}, {"grid": "narrow"}, {"symmetric": False}),
    )
]  # fmt: skip


def label(s):
    return f"int{s.bits}-{s.granularity}-{s.scale_dtype}-{s.grid if s.symmetric else 'asym'}"


schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=label)
SHAPES = ((4, 64), (2, 4, 64))


class _Straight(torch.autograd.Function):
    """f(x) forward, identity backward."""

    @staticmethod
    def forward(ctx, x, f):
        return f(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def composed(w, scale, zero, scheme, method):
    """Fake-quant written with ordinary operations: round is straight-through, clamp and product are autograd's own."""
    n = w.numel() // scale.numel()
    floor, ceiling = scale_bounds(scheme, w.dtype)
    served = _Straight.apply(scale, lambda s: s.to(scheme.torch_scale_dtype).to(w.dtype).clamp(floor, ceiling))
    served = _ScaleGrad.apply(served, 1 / math.sqrt(n * scheme.qmax)).unsqueeze(-1)
    offset = 0 if zero is None else zero.unsqueeze(-1)
    clipped = method.gradient == "clipped"
    source = w if clipped else w.detach()
    rounded = _Straight.apply(source.reshape(*scale.shape, -1) / served, torch.round)
    codes = torch.clamp(rounded + offset, scheme.qmin, scheme.qmax)
    w_hat = ((codes - offset) * served).view(w.shape)
    return w_hat if clipped else w_hat + (w - w.detach())  # `ste`: the identity reaches w, past the clamp


def leaves(shape, scheme, seed=0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, dtype=torch.float64, generator=g)
    scale_shape = scheme.scale_shape(shape)
    scale = (torch.rand(scale_shape, dtype=torch.float64, generator=g) + 0.5) / scheme.divisor  # clips some
    zero = None if scheme.symmetric else torch.randint(-2, 2, scale_shape, dtype=torch.int8, generator=g)
    grad = torch.randn(shape, dtype=torch.float64, generator=g)
    return w.requires_grad_(), scale.requires_grad_(), zero, grad


@schemes
@pytest.mark.parametrize("gradient", ["ste", "clipped"])
def test_lsq_equals_the_composition(scheme, gradient):
    method = RangeMethod(learned=True, gradient=gradient)
    for shape in SHAPES:
        w, scale, zero, grad = leaves(shape, scheme)
        w_hat = fake_quantize_weight(w, scheme, method, scale, zero)
        got = torch.autograd.grad(w_hat, (w, scale), grad)
        expected_hat = composed(w, scale, zero, scheme, method)
        expected = torch.autograd.grad(expected_hat, (w, scale), grad)
        assert torch.equal(w_hat, expected_hat)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-14, atol=0)  # autograd's is g * s / s
        torch.testing.assert_close(got[1], expected[1], rtol=1e-12, atol=1e-12)
        if gradient == "clipped":
            assert (got[0] == 0).any(), "this test must clip something"


@schemes
@pytest.mark.parametrize("gradient", ["ste", "clipped"])
def test_weight_gradient_with_a_given_scale(scheme, gradient):
    method = RangeMethod(gradient=gradient)
    for shape in SHAPES:
        w, scale, zero, grad = leaves(shape, scheme)
        w_hat = fake_quantize_weight(w, scheme, method, scale, zero)
        (got,) = torch.autograd.grad(w_hat, w, grad)
        (expected,) = torch.autograd.grad(composed(w, scale.detach(), zero, scheme, method), w, grad)
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)
        assert gradient == "clipped" or torch.equal(got, grad)


def test_lsq_gradient_scale_is_per_group():
    """Every group's gradient carries 1 / sqrt(n * qmax) of its own size: same data, other group size, known ratio."""
    w = torch.randn(4, 64, dtype=torch.float64)
    grads = {}
    for group in (16, 64):
        scheme = QuantScheme(group_size=group, scale_dtype="float32")
        scale = torch.full(scheme.scale_shape(w.shape), 0.25, dtype=torch.float64, requires_grad=True)
        fake_quantize_weight(w, scheme, RangeMethod(learned=True), scale).sum().backward()
        grads[group] = scale.grad.sum(-1, keepdim=True)
    torch.testing.assert_close(grads[16], grads[64] * 2, rtol=1e-12, atol=1e-12)


@schemes
@pytest.mark.parametrize("value", [0.0, -1.0, 1e-45, float("inf")])
def test_pushed_learned_scale_stays_finite(scheme, value):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        w = torch.randn(4, 64).to(dtype).requires_grad_()
        scale = torch.full(scheme.scale_shape(w.shape), value).requires_grad_()
        zero = None if scheme.symmetric else torch.zeros(scale.shape, dtype=torch.int8)
        for gradient in ("ste", "clipped"):
            w.grad = scale.grad = None
            w_hat = fake_quantize_weight(w, scheme, RangeMethod(learned=True, gradient=gradient), scale, zero)
            w_hat.backward(w.detach().sign())  # every clamped weight asks for a larger scale
            assert (scale == value).all(), "the parameter itself must not be touched"
            assert w_hat.isfinite().all() and w.grad.isfinite().all() and scale.grad.isfinite().all()
            if value <= 0:
                assert (scale.grad > 0).all(), "no gradient to come back with"


@pytest.mark.parametrize("method, allowed", [
    (RangeMethod(), 0), (RangeMethod(gradient="clipped"), 2), (RangeMethod(learned=True), 2),
    (RangeMethod(kind="mse", gradient="clipped"), 2),
])  # fmt: skip
def test_backward_keeps_only_weight_and_scale(method, allowed):
    scheme = QuantScheme(group_size=32)
    w = torch.randn(64, 64, requires_grad=True)
    scale = torch.full(scheme.scale_shape(w.shape), 0.2, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fake_quantize_weight(w, scheme, method, scale if method.learned else None)
    others = [t for t in saved if t.data_ptr() not in (w.data_ptr(), scale.data_ptr())]
    assert len(saved) <= allowed
    assert all(t.shape == scale.shape for t in others), "something of the weight's size is kept"


@pytest.mark.parametrize(
    "scheme", [QuantScheme(8, "per_token"), QuantScheme(4, "per_token", symmetric=False), QuantScheme(4, group_size=16)]
)
def test_activation_gradient_is_straight_through(scheme):
    x, grad, saved = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 5, 32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x_hat = fake_quantize_activation(x, scheme)
    assert not saved
    assert torch.equal(torch.autograd.grad(x_hat, x, grad)[0], grad)
