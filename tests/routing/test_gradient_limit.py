"""The limit on router-logit gradients, against a loop over tokens."""

import pytest
import torch

from qdeepseek.routing.gradient import LimitConfig, limit_gradient


def naive(grad, logits, count, max_norm, max_logit):
    out = grad.clone()
    for t in range(len(grad)):
        for e in range(grad.shape[1]):
            if logits[t, e] > max_logit and grad[t, e] < 0:
                out[t, e] = 0
        norm = float(out[t].double().norm()) * count
        if norm > max_norm:
            out[t] *= max_norm / norm
    return out


def test_limit_equals_the_loop():
    torch.manual_seed(0)
    grad, logits = torch.randn(64, 8) * 0.05, torch.randn(64, 8) * 5
    found, clipped, held = limit_gradient(grad, logits, 10, LimitConfig())
    torch.testing.assert_close(found, naive(grad, logits, 10, 1.0, 5.0))
    assert 0 < int(clipped.sum()) < 64 and 0 < int(held.sum()) < 64
    assert bool(((found * 10).norm(dim=-1) <= 1 + 1e-6).all())


def test_a_small_gradient_of_a_small_logit_is_untouched():
    grad, logits = torch.randn(5, 4) * 1e-3, torch.randn(5, 4)
    found, clipped, held = limit_gradient(grad, logits, torch.tensor(4), LimitConfig())
    assert torch.equal(found, grad) and not clipped.any() and not held.any()


def test_only_growth_is_held():
    grad = torch.tensor([[-1.0, 1.0, -1.0, 1.0]]) * 1e-3
    found, _, held = limit_gradient(grad, torch.tensor([[6.0, 6, 4, -9]]), 1, LimitConfig())
    assert found.tolist() == [[0, *grad[0, 1:].tolist()]] and held.tolist() == [1]


def test_limits_can_be_left_out_and_dtype_stays():
    grad = torch.tensor([[-3.0, 4.0]], dtype=torch.bfloat16)
    free, _, _ = limit_gradient(grad, torch.full((1, 2), 9.0), 1, LimitConfig(None, None))
    assert torch.equal(free, grad)
    clipped, _, _ = limit_gradient(grad, torch.zeros(1, 2), 1, LimitConfig(max_logit=None))
    assert clipped.dtype == torch.bfloat16 and clipped.float().norm() == pytest.approx(1, rel=1e-2)


def test_wrong_value_is_refused():
    with pytest.raises(ValueError, match=r"max_norm 0 must be positive"):
        LimitConfig(max_norm=0)
