"""Load statistics and the bias update against numbers worked out by hand."""

import pytest
import torch

from qdeepseek.routing.bias import update_bias_
from qdeepseek.routing.load import expert_load, load_entropy, max_violation


def test_load_counts_every_choice():
    indices = torch.tensor([[0, 1], [0, 3], [0, 1]])
    assert expert_load(indices, 4).tolist() == [3, 2, 0, 1]


def test_entropy_and_violation():
    even, one, half = torch.ones(8), torch.tensor([5.0, 0, 0, 0]), torch.tensor([2.0, 2, 0, 0])
    assert float(load_entropy(even)) == pytest.approx(3.0)
    assert float(load_entropy(one)) == 0.0
    assert float(load_entropy(half)) == pytest.approx(1.0)
    assert max_violation(torch.stack([one, half])).tolist() == pytest.approx([3.0, 1.0])
    assert float(load_entropy(torch.zeros(4))) == 0.0  # no token at all: finite


def test_bias_moves_towards_the_mean_by_its_speed():
    bias = torch.zeros(4)
    update_bias_(bias, torch.tensor([8.0, 4.0, 4.0, 0.0]), speed=0.5)
    assert bias.tolist() == [-0.5, 0.0, 0.0, 0.5]
