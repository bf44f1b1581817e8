"""W + s·B·A against its naive form, and the norm of the part that is added."""

import pytest
import torch

from qdeepseek.layers.low_rank import add_low_rank, low_rank_norm

SHAPES = {"linear": ((5, 7), (3, 7), (5, 3)), "experts": ((4, 5, 7), (4, 3, 7), (4, 5, 3))}


def drawn(kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES[kind]]


@pytest.mark.parametrize("kind", SHAPES)
def test_equals_the_naive_sum_in_float64(kind):
    w, a, b = drawn(kind, torch.float64)
    naive = w.clone()
    for r in range(a.shape[-2]):
        naive += 0.5 * b[..., :, r, None] * a[..., r, None, :]
    torch.testing.assert_close(add_low_rank(w, a, b, 0.5), naive, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients(kind):
    w, a, b = (t.requires_grad_() for t in drawn(kind, torch.float64))
    assert torch.autograd.gradcheck(lambda *t: add_low_rank(*t, 0.5), (w, a, b))


@pytest.mark.parametrize("kind", SHAPES)
def test_zero_b_changes_no_bit_and_autocast_none_either(kind):
    w, a, b = drawn(kind, torch.float32)
    assert torch.equal(add_low_rank(w, a, torch.zeros_like(b), 2.0), w)
    outside = add_low_rank(w, a, b, 2.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(add_low_rank(w, a, b, 2.0), outside)
    assert add_low_rank(w.bfloat16(), a, b, 2.0).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", SHAPES)
def test_norm(kind):
    _, a, b = drawn(kind, torch.float64)
    torch.testing.assert_close(low_rank_norm(a, b, 0.5), (0.5 * (b @ a)).norm().float())
