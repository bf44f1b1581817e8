"""Interval statistics, drift to another router, and the temperature in the weight, against small cases by hand."""

import math

import pytest
import torch

from qdeepseek.routing import statistics
from qdeepseek.routing.kl import router_kl
from qdeepseek.routing.load import differs, expert_load
from qdeepseek.routing.temperature import TemperatureConfig, adapt, fold_

INDICES = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 2]])
OTHERS = torch.tensor([[1, 0], [0, 3], [0, 1], [1, 2]])
REAL = torch.tensor([True, True, True, False])


def test_padding_is_in_no_load_and_order_is_no_difference():
    assert expert_load(INDICES, 4, REAL).tolist() == [3, 2, 1, 0]
    assert differs(INDICES, OTHERS).tolist() == [False, True, False, True]


def test_summary_of_two_halves_is_that_of_the_whole():
    log_p = torch.full((4, 4), 0.25).log()
    whole, halves = statistics.empty(1, 4, torch.device("cpu")), statistics.empty(1, 4, torch.device("cpu"))
    statistics.add_tokens_(whole[0], log_p, INDICES, REAL, OTHERS)
    for part in (slice(0, 2), slice(2, 4)):
        statistics.add_tokens_(halves[0], log_p[part], INDICES[part], REAL[part], OTHERS[part])
    assert torch.equal(whole, halves)
    found = dict(zip(statistics.NAMES, statistics.summary(whole)[0].tolist()))
    bits = -sum(f * math.log2(f) for f in (1 / 2, 1 / 3, 1 / 6))
    assert found["load_entropy_bits"] == pytest.approx(bits)
    assert found["load_entropy_normalised"] == pytest.approx(bits / 2)
    assert found["unused_experts"] == 1 and found["max_over_mean"] == pytest.approx(2)
    assert found["score_entropy"] == pytest.approx(1) and found["topk_changed"] == pytest.approx(1 / 3)
    assert statistics.loads(whole)[1].tolist() == [[3, 2, 0, 1]]


def test_without_an_unquantised_model_its_change_is_unknown():
    sums = statistics.empty(1, 4, torch.device("cpu"))
    statistics.add_tokens_(sums[0], torch.full((4, 4), 0.25).log(), INDICES, REAL)
    assert math.isnan(statistics.summary(sums)[0, statistics.NAMES.index("topk_changed")])


def test_kl_is_zero_for_the_same_router_and_written_out_otherwise():
    p, q = (torch.randn(3, 4, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    real = torch.tensor([True, False, True])
    expected = sum(float((q[t].exp() * (q[t] - p[t])).sum()) for t in (0, 2)) / 2
    assert float(router_kl(p, q, real)) == pytest.approx(expected) and float(router_kl(p, p, real)) == 0
    assert torch.autograd.gradcheck(
        lambda z: router_kl(z.log_softmax(-1), q, real), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    )


def test_temperature_follows_the_entropy_within_its_bound_and_scales_the_logits():
    config = TemperatureConfig(target=0.8, speed=0.5, largest=2.0)
    tau = adapt(torch.tensor([0.0, 0.0, 0.6]), torch.tensor([0.5, 0.9, 0.5]), config)
    assert tau.tolist() == pytest.approx([0.5, -0.5, math.log(2)])
    weight, hidden = torch.randn(4, 8), torch.randn(3, 8)
    before = hidden @ weight.T
    fold_(weight, torch.tensor(0.0), tau[0])
    torch.testing.assert_close(hidden @ weight.T, before / math.exp(0.5))
    with pytest.raises(ValueError, match=r"target 1\.5 is a share"):
        TemperatureConfig(target=1.5)
