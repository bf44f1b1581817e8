"""The entropy loss against sums written out in loops, its gradient, its schedule and its floor."""

import math

import pytest
import torch

from qdeepseek.routing.entropy import (
    EntropyConfig,
    below_target,
    entropy_loss,
    negative_entropy,
    probability_sums,
    token_entropy,
)

REAL = torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool)


def log_p(layers=2, tokens=6, experts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(layers, tokens, experts, dtype=torch.float64, generator=generator)
    return [layer.log_softmax(-1).requires_grad_() for layer in z]


def naive(layers, real, weight, token_weight):
    """λ Σ_e p̄ log p̄ + μ mean_t H(p_t), one token and one expert at a time."""
    total = 0.0
    for layer in (one.detach() for one in layers):
        tokens = [t for t in range(len(real)) if real[t]]
        for e in range(layer.shape[1]):
            mean = sum(math.exp(float(layer[t, e])) for t in tokens) / len(tokens)
            total += weight * mean * math.log(mean)
        for t in tokens:
            for e in range(layer.shape[1]):
                p = math.exp(float(layer[t, e]))
                total -= token_weight * p * math.log(p) / len(tokens)
    return total


@pytest.mark.parametrize("token_weight", [0.0, 0.3])
def test_loss_is_the_sum_over_layers_without_padding(token_weight):
    layers, load = log_p(), torch.ones(2, 4)
    config = EntropyConfig(weight=0.5, token_weight=token_weight)
    found = entropy_loss(layers, load, REAL, config, 0.5)
    assert float(found.detach()) == pytest.approx(naive(layers, REAL, 0.5, token_weight), rel=1e-12)
    found.backward()
    assert all(not layer.grad[~REAL].any() and bool(layer.grad[REAL].all()) for layer in layers)


def test_gradient():
    def loss(z):
        config = EntropyConfig(weight=0.5, token_weight=0.3)
        return entropy_loss([z.log_softmax(-1)], torch.ones(1, 4), REAL, config, 0.5)

    assert torch.autograd.gradcheck(loss, torch.randn(6, 4, dtype=torch.float64, requires_grad=True))


def test_balanced_experts_are_the_minimum_and_a_step_goes_there():
    z = torch.tensor([[3.0, 0, 0, 0]] * 6, requires_grad=True)
    config, one = EntropyConfig(), torch.ones(6, dtype=torch.bool)
    entropy_loss([z.log_softmax(-1)], torch.ones(1, 4), one, config, 1.0).backward()
    assert (z.grad[:, 0] > 0).all() and (z.grad[:, 1:] < 0).all()  # descent lowers the favourite
    assert float(negative_entropy(torch.full((4,), 0.25))) == pytest.approx(-math.log(4))


def test_an_expert_of_probability_zero_has_a_finite_gradient():
    z = torch.tensor([[200.0, 0, -200, 0]], requires_grad=True)
    entropy_loss(
        [z.log_softmax(-1)], torch.ones(1, 4), torch.ones(1, dtype=torch.bool), EntropyConfig(), 1.0
    ).backward()
    assert z.grad.isfinite().all()


def test_only_padding_is_zero():
    layers = log_p()
    loss = entropy_loss(
        layers, torch.zeros(2, 4), torch.zeros(6, dtype=torch.bool), EntropyConfig(token_weight=1.0), 1.0
    )
    loss.backward()
    assert float(loss.detach()) == 0 and all(layer.grad.isfinite().all() for layer in layers)


def test_token_entropy_and_sums():
    certain = torch.tensor([[0.0, -50, -50, -50], [math.log(0.25)] * 4], dtype=torch.float64)
    assert token_entropy(certain).tolist() == pytest.approx([0, math.log(4)], abs=1e-15)
    assert probability_sums(certain, torch.tensor([0, 1])).tolist() == pytest.approx([0.25] * 4)


def test_a_layer_above_its_target_is_not_pushed():
    load = torch.tensor([[8.0, 8, 8, 8], [16, 16, 0, 0], [32, 0, 0, 0]])  # 1, 1/2 and 0 of log2 4
    assert below_target(load, 0.75).tolist() == [0, 1, 1]
    assert below_target(load, None).tolist() == [1, 1, 1]
    layers = log_p(3)
    entropy_loss(layers, load, REAL, EntropyConfig(target=0.75), 1.0).backward()
    assert [bool(layer.grad.any()) for layer in layers] == [False, True, True]


def test_schedule():
    config = EntropyConfig(weight=0.4, decay="linear", decay_until=0.5)
    assert [config.weight_at(p) for p in (0, 0.25, 0.5, 1)] == pytest.approx([0.4, 0.2, 0, 0])
    assert EntropyConfig(weight=0.4, decay="cosine").weight_at(0.5) == pytest.approx(0.2)
    assert EntropyConfig(weight=0.4).weight_at(1.0) == 0.4


@pytest.mark.parametrize(
    "wrong", [{"scope": "rank"}, {"decay": "step"}, {"target": 2.0}, {"weight": -1.0}, {"decay_until": 0}]
)
def test_wrong_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EntropyConfig(**wrong)
