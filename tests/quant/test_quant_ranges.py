"""Percentile, IQR and MSE ranges against a loop over groups."""

import pytest
import torch

from qdeepseek.quant import QuantScheme, RangeMethod, find_range, ranges
from qdeepseek.quant.grid import fake_quantize, scale_from_range

SCHEMES = [
    QuantScheme(bits, granularity, 32, symmetric, scale_dtype="float32")
    for bits in (2, 4) for granularity in ("per_tensor", "per_channel", "per_group") for symmetric in (True, False)
]  # fmt: skip
schemes = pytest.mark.parametrize(
    "scheme", SCHEMES, ids=lambda s: f"int{s.bits}-{s.granularity}-{'sym' if s.symmetric else 'asym'}"
)


def heavy(shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64) ** 3


def groups(w, scheme):
    return w.reshape(-1, w.numel() // torch.Size(scheme.scale_shape(w.shape)).numel())


def assert_same_range(lo, hi, low, high, scheme):
    """Symmetric: the same absmax, which is all the grid takes from a range."""
    lo, hi = lo.flatten(), hi.flatten()
    if scheme.symmetric:
        lo, hi, low, high = hi * 0, torch.maximum(hi, -lo), high * 0, torch.maximum(high, -low)
    torch.testing.assert_close(lo, low, rtol=1e-12, atol=0)
    torch.testing.assert_close(hi, high, rtol=1e-12, atol=0)


@schemes
@pytest.mark.parametrize("shape", [(4, 64), (2, 4, 64)])
@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_mse_search_equals_a_loop(scheme, shape, norm, monkeypatch):
    monkeypatch.setattr(ranges, "SLICE", 100)  # several slices
    method = RangeMethod(kind="mse", mse_grid=12, mse_min_ratio=0.3, mse_norm=norm)
    w = heavy(shape)
    lo, hi = find_range(w, scheme, method)
    clipped = 0
    for group, got_lo, got_hi in zip(groups(w, scheme), lo.flatten(), hi.flatten()):
        best = None
        for step in range(12):
            ratio = torch.linspace(1, 0.3, 12)[step].item()
            low, high = group.min().view(1) * ratio, group.max().view(1) * ratio
            scale, zero = scale_from_range(low, high, scheme, w.dtype)
            error = (fake_quantize(group, scale, zero, scheme) - group).abs().pow(norm).sum().item()
            if best is None or error < best[0]:
                best = (error, low, high, step)
        assert (got_lo, got_hi) == (best[1].item(), best[2].item())
        clipped += best[3] > 0
    assert clipped, "the search never left min-max: the test shows nothing"


@schemes
def test_percentile_is_torch_quantile(scheme):
    method = RangeMethod(kind="percentile", percentile=95.0)
    w = heavy((4, 64))
    lo, hi = find_range(w, scheme, method)
    x = groups(w, scheme)
    expected = (-x.abs().quantile(0.95, -1),) * 2 if scheme.symmetric else (x.quantile(0.05, -1), x.quantile(0.95, -1))
    assert_same_range(lo, hi, *expected, scheme)


@schemes
def test_iqr_fence(scheme):
    w = heavy((4, 64))
    lo, hi = find_range(w, scheme, RangeMethod(kind="iqr", iqr_factor=1.5))
    x = groups(w, scheme)
    q1, q3 = x.quantile(0.25, -1), x.quantile(0.75, -1)
    low, high = torch.maximum(x.amin(-1), q1 - 1.5 * (q3 - q1)), torch.minimum(x.amax(-1), q3 + 1.5 * (q3 - q1))
    assert_same_range(lo, hi, low, high, scheme)
    assert (low > x.amin(-1)).any() or (high < x.amax(-1)).any(), "the fence cut nothing"
    wide = find_range(w, scheme, RangeMethod(kind="iqr", iqr_factor=1e6))
    assert torch.equal(wide[0], find_range(w, scheme, RangeMethod())[0])


@pytest.mark.parametrize("kind", ["percentile", "iqr", "mse"])
def test_sparse_group_is_not_erased(kind):
    """A fence around zeros would quantise the few weights of the group to zero."""
    w = torch.zeros(1, 64)
    w[0, 3] = 1.0
    lo, hi = find_range(w, QuantScheme(granularity="per_channel"), RangeMethod(kind=kind, percentile=90.0))
    assert torch.maximum(hi, -lo) > 0.4


@pytest.mark.parametrize("kind", ["minmax", "percentile", "iqr", "mse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_range_dtype_and_zero_groups(kind, dtype):
    w = torch.randn(2, 4, 64).to(dtype)
    w[0, 0] = 0
    lo, hi = find_range(w, QuantScheme(), RangeMethod(kind=kind))
    assert lo.dtype == hi.dtype == torch.float32 and lo.shape == (2, 4, 2)
    assert not lo[0, 0].any() and lo.isfinite().all() and hi.isfinite().all()


def test_of_equal_errors_the_widest_range_wins():
    """A group of zeros has no error at any ratio: nothing to gain from clipping it."""
    scheme, method = QuantScheme(bits=2, granularity="per_channel", grid="narrow"), RangeMethod(kind="mse")
    low, high = ranges.clip_ratio(torch.zeros(3, 64), scheme, method, (3, 1))
    assert torch.equal(low, torch.ones(3, 1)) and torch.equal(high, torch.ones(3, 1))
