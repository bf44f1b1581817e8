"""CAGE against the corrected Adam written out, its schedule; LSQ's bound against a loop over groups."""

import pytest
import torch

from qdeepseek.compensate.cage import adam_denominator, pull_, strength
from qdeepseek.compensate.lsq import normalise

LR, EPS, BETAS = 0.01, 1e-8, (0.9, 0.95)


def grid(w):
    return (w * 8).round() / 8


def naive_run(grads, w, lambdas, metric):
    """w <- w' - lr * D^-1 (lambda * H * (w' - Q(w'))), w' = Adam's step; H is D or 1; every element by itself."""
    w, m, v = w.clone(), torch.zeros_like(w), torch.zeros_like(w)
    for t, (g, now) in enumerate(zip(grads, lambdas, strict=True), 1):
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        denominator = (v / (1 - BETAS[1] ** t)).sqrt() + EPS
        w = w - LR * m / (1 - BETAS[0] ** t) / denominator
        curvature = denominator if metric == "adam" else torch.ones_like(w)
        share = (LR * now * curvature / denominator).clamp(max=1)
        w = w - share * (w - grid(w))
    return w


@pytest.mark.parametrize("metric", ["adam", "identity"])
@pytest.mark.parametrize("peak", [5.0, 1000.0])
def test_cage_is_adam_on_the_corrected_gradient(metric, peak):
    torch.manual_seed(0)
    start, grads = torch.randn(4, 6, dtype=torch.float64), torch.randn(12, 4, 6, dtype=torch.float64)
    lambdas = [strength(t, 12, peak, 0.25, True) for t in range(12)]
    w = torch.nn.Parameter(start.clone())
    adam = torch.optim.AdamW([w], lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    for g, now in zip(grads, lambdas, strict=True):
        w.grad = g.clone()
        adam.step()
        state = adam.state[w]
        denominator = None if metric == "adam" else adam_denominator(state["exp_avg_sq"], state["step"], BETAS[1], EPS)
        with torch.no_grad():
            pull_(w, grid(w), LR * now, denominator)
    torch.testing.assert_close(w.detach(), naive_run(grads, start, lambdas, metric), rtol=1e-12, atol=1e-12)


def test_the_pull_ends_on_the_grid_and_not_beyond():
    w = torch.randn(5, 5)
    on_grid = w.clone()
    pull_(on_grid, grid(w), 7.0)
    torch.testing.assert_close(on_grid, grid(w))
    on_grid = grid(w)
    pull_(on_grid, grid(on_grid), 0.3)
    assert torch.equal(on_grid, grid(w))


def test_strength_is_silent_then_rises_to_its_peak():
    ramp = [strength(t, 10, 8.0, 0.6, True) for t in range(10)]
    assert ramp == [0, 0, 0, 0, 0, 0, 2, 4, 6, 8]
    assert [strength(t, 10, 8.0, 0.6, False) for t in range(10)] == [0] * 6 + [8] * 4
    assert [strength(t, 4, 8.0, 0.0, True) for t in range(4)] == [2, 4, 6, 8]
    assert {strength(t, 4, 8.0, 1.0, True) for t in range(4)} == {0}


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
@pytest.mark.parametrize("limit", [0.0001, 0.5, 1e9])
def test_lsq_bound_equals_a_loop_over_groups(shape, limit):
    torch.manual_seed(0)
    w, grad_w = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    s = torch.rand(*shape[:-1], 2, dtype=torch.float64) - 0.2  # a learned scale may have crossed zero
    grad_s = torch.randn_like(s)
    grad_w[..., :4] *= 0.01
    expected, factors = grad_s.clone().view(-1), []
    for i, (gs, ss, gw, ww) in enumerate(
        zip(grad_s.view(-1), s.view(-1), grad_w.view(-1, 4), w.view(-1, 4), strict=True)
    ):
        ratio = abs(gs / ss) / (gw.norm() / ww.norm())
        factors.append(min(1.0, float(limit / ratio)))
        expected[i] = gs * factors[-1]
    found = normalise(grad_s, s, grad_w, w, limit)
    torch.testing.assert_close(found.grad.view(-1), expected, rtol=1e-12, atol=0)
    assert float(found.factor) == pytest.approx(sum(factors) / len(factors))
    assert float(found.fired) == sum(f < 1 for f in factors) / len(factors)
    if limit == 1e9:
        assert torch.equal(found.grad, grad_s)


def test_lsq_leaves_groups_without_gradient_and_stays_finite():
    s, w = torch.ones(2, 2), torch.ones(2, 8)
    found = normalise(torch.zeros(2, 2), s, torch.zeros(2, 8), w, 1.0)
    assert torch.equal(found.grad, torch.zeros(2, 2)) and float(found.fired) == 0 and float(found.factor) == 1
    found = normalise(torch.ones(2, 2), s, torch.ones(2, 8), torch.zeros(2, 8), 1.0)
    assert found.grad.isfinite().all()
