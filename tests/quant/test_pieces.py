"""A weight taken in pieces gives the bits of the whole, values and gradients, and needs the memory of a piece."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qdeepseek.quant import QuantScheme, RangeMethod, fake_quantize_weight, find_range, grid

E, O, I = 3, 16, 64  # noqa: E741
SCHEMES = {
    "per_group": QuantScheme(group_size=32),
    "per_channel": QuantScheme(granularity="per_channel"),
    "per_tensor": QuantScheme(granularity="per_tensor"),
    "asymmetric": QuantScheme(group_size=32, symmetric=False),
    "served_bf16": QuantScheme(group_size=32, serve_dtype="bfloat16"),
    "int2": QuantScheme(2, group_size=16),
}


def case(scheme, learned, gradient, dtype, shape):
    """w_hat and gradients, with a scale that clips some weights."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(shape, generator=g).to(dtype)
    method = RangeMethod(learned=learned, gradient=gradient)
    scale, zero = grid.scale_from_range(*find_range(w, scheme, method), scheme, dtype)
    w.requires_grad_()
    scale = (scale * 0.6).float().requires_grad_(learned)
    w_hat = fake_quantize_weight(w, scheme, method, scale, zero)
    grads = torch.autograd.grad(w_hat, [w, scale] if learned else [w], torch.randn(shape, generator=g).to(dtype))
    return [w_hat.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", ["ste", "clipped"])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_same_bits(name, learned, gradient, dtype, monkeypatch):
    for shape in ((E, O, I), (O, I)):
        whole = case(SCHEMES[name], learned, gradient, dtype, shape)
        for piece in (1, 100, 700):  # one group; a few, and a ragged rest
            monkeypatch.setattr(grid, "PIECE", piece)
            for a, b in zip(case(SCHEMES[name], learned, gradient, dtype, shape), whole, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        monkeypatch.undo()


class Largest(TorchDispatchMode):
    """Tensors of more than `limit` elements that operations allocate."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.made = limit, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, given = func(*args, **(kwargs or {})), {a.untyped_storage().data_ptr() for a in args if torch.is_tensor(a)}
        if torch.is_tensor(out) and out.numel() > self.limit and out.untyped_storage().data_ptr() not in given:
            self.made.append(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize(("gradient", "made"), [("ste", ["empty"]), ("clipped", ["empty", "empty"])])
def test_only_results_are_of_the_size_of_the_weight(gradient, made, monkeypatch):
    monkeypatch.setattr(grid, "PIECE", 512)
    scheme, method = SCHEMES["per_group"], RangeMethod(learned=True, gradient=gradient)
    w, grad = torch.randn(E, O, I, requires_grad=True), torch.randn(E, O, I)
    scale = torch.full((E, O, I // 32), 0.1, requires_grad=True)
    with Largest(512) as largest:
        w_hat = fake_quantize_weight(w, scheme, method, scale)
        torch.autograd.grad(w_hat, [w, scale], grad)
    assert largest.made == made
