"""Sampled statistics: over all groups where there are few, over every k-th where there are many."""

import pytest
import torch

from qdeepseek.quant import QuantScheme, grid
from qdeepseek.quant.metrics import mse, saturation
from qdeepseek.quant.sampled import grid_statistics, sample_groups, scale_change

SCHEMES = [
    QuantScheme(4, "per_group", 32), QuantScheme(4, "per_group", 32, grid="narrow"), QuantScheme(4, "per_channel"),
    QuantScheme(4, "per_tensor"), QuantScheme(4, "per_group", 32, symmetric=False),
]  # fmt: skip


def quantised(scheme, shape, seed=0):
    torch.manual_seed(seed)
    w = torch.randn(shape)
    blocks = w.reshape(*scheme.scale_shape(shape), -1)
    scale, zero = grid.scale_from_range(blocks.amin(-1), blocks.amax(-1), scheme, w.dtype)
    return w, scale * 0.8, zero  # so that some weights are cut


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", [(8, 64), (3, 8, 64)])
def test_with_few_groups_it_is_the_statistic_of_the_whole_weight(scheme, shape):
    w, scale, zero = quantised(scheme, shape)
    found = grid_statistics(sample_groups(w, scale, zero, 4096), scheme)
    codes = grid.quantize(w, scale, zero, scheme)
    w_hat = grid.dequantize(codes, scale, zero, scheme)
    expected = torch.stack([saturation(codes, scheme), mse(w_hat, w), w.square().mean()])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found[0] > 0


@pytest.mark.parametrize("most", [1, 7, 16, 47])
def test_with_many_groups_it_is_that_of_every_kth(most):
    scheme = SCHEMES[0]
    w, scale, zero = quantised(scheme, (3, 8, 64))
    stride = next(k for k in range(1, 49) if len(range(0, 48, k)) <= most)
    blocks, scale_S, none = sample_groups(w, scale, zero, most)
    assert none is None
    picked = [w.reshape(48, 32)[i] for i in range(0, 48, stride)]
    assert torch.equal(blocks, torch.stack(picked))
    assert torch.equal(scale_S[:, 0], scale.reshape(48)[::stride])
    assert blocks.untyped_storage().data_ptr() == w.untyped_storage().data_ptr(), "no copy of the weight"


def test_change_of_scales():
    first = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    now = torch.tensor([[1.0], [1.0], [5.0], [8.0]])
    assert scale_change(now, first).tolist() == [0.1875, 0.5]
    assert scale_change(first, first).tolist() == [0, 0]
