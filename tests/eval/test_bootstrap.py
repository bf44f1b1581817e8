"""Bootstrap intervals: coverage on known distributions, pairing, and gaps that cannot be stated."""

import numpy as np
import pytest

from eval.bootstrap import estimate, gap_recovered, percentile_interval, resampled_means


def test_seeded_and_independent_of_chunking():
    rng = np.random.default_rng(0)
    sums, counts = rng.normal(size=(3, 40)), rng.integers(1, 9, 40)
    a = resampled_means(sums, counts, resamples=200, seed=1)
    chunked = resampled_means(sums, counts, resamples=200, seed=1, max_elements=80)
    np.testing.assert_allclose(a, chunked, rtol=1e-12)  # same draws; a matmul of other size rounds otherwise
    assert not np.array_equal(a, resampled_means(sums, counts, resamples=200, seed=2))
    assert a.shape == (3, 200)


def test_the_standard_error_is_that_of_theory():
    rng = np.random.default_rng(0)
    x = rng.normal(size=400)
    draws = resampled_means(x, np.ones(400), resamples=4000)[0]
    assert draws.mean() == pytest.approx(x.mean(), abs=4 * x.std() / 20 / np.sqrt(4000))
    assert draws.std() == pytest.approx(x.std() / 20, rel=0.05)


def test_a_constant_per_token_has_no_spread_whatever_the_lengths():
    counts = np.array([1.0, 100.0, 7.0])
    assert np.allclose(resampled_means(2.5 * counts, counts), 2.5)


def test_intervals_hold_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(200):
        counts = rng.integers(50, 150, 60).astype(float)
        sums = counts * (1.2 + rng.normal(scale=0.3, size=60))
        low, high = percentile_interval(resampled_means(sums, counts, resamples=400, seed=trial)[0])
        hits += low <= 1.2 <= high
    assert 0.90 <= hits / 200 <= 0.98  # binomial spread of 200 trials is ±.015


def paired(seed, gap, units=80, noise=0.004):
    """Columns fp_ft, rtn, qat that share their document spread; qat sits at 30 % of the gap."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(50, 150, units).astype(float)
    document = 1.2 + rng.normal(scale=0.3, size=units)
    rows = [document + shift + rng.normal(scale=noise, size=units) for shift in (0, gap, 0.3 * gap)]
    sums = np.stack(rows) * counts
    draws = resampled_means(sums, counts, seed=seed)
    return [(float(s.sum() / counts.sum()), d) for s, d in zip(sums, draws)]


def test_gap_recovered_is_paired_and_covers():
    hits = 0
    for seed in range(40):
        fp_ft, rtn, qat = paired(seed, 0.02)
        found = gap_recovered(rtn, fp_ft, qat)
        hits += found.low <= 0.7 <= found.high
        assert found.high - found.low < 0.25  # unpaired, the spread of documents gives units
    assert hits >= 35


def test_gap_without_a_clear_denominator_is_absent_and_says_why():
    fp_ft, rtn, qat = paired(0, 0.0)
    found = gap_recovered(rtn, fp_ft, qat)
    assert found.value is None and found.interval is None
    assert "not clearly above zero" in found.reason and "nats" in found.reason
    zero, wide = np.zeros(2000), np.linspace(-0.01, 0.03, 2000)  # a positive mean whose interval holds zero
    assert gap_recovered((0.01, wide), (0.0, zero), (0.005, wide / 2)).value is None
    assert gap_recovered((0.02, wide + 0.01), (0.0, zero), (0.01, wide / 2)).value == 0.5
    worse = gap_recovered(fp_ft, (fp_ft[0] + 1, fp_ft[1] + 1), qat)
    assert worse.value is None and "-1" in worse.reason


def test_gap_may_be_negative_or_above_one():
    fp_ft, rtn, _ = paired(1, 0.05)
    assert gap_recovered(rtn, fp_ft, (rtn[0] + 1, rtn[1] + 1)).value < 0
    assert gap_recovered(rtn, fp_ft, (fp_ft[0] - 1, fp_ft[1] - 1)).value > 1
    assert gap_recovered(rtn, fp_ft, fp_ft).value == 1 and gap_recovered(rtn, fp_ft, rtn).value == 0


def test_kl_gap_uses_zero_for_the_teacher():
    zero = (0.0, np.zeros(2000))
    rng = np.random.default_rng(0)
    rtn = resampled_means(rng.uniform(0.01, 0.02, 50), np.ones(50))[0]
    found = gap_recovered((0.015, rtn), zero, (0.003, rtn / 5))
    assert found.value == pytest.approx(0.8) and found.low == pytest.approx(0.8)


def test_estimate_and_errors():
    found = estimate(1.0, np.arange(101.0))
    assert found.interval == pytest.approx([2.5, 97.5])
    with pytest.raises(ValueError, match="drop units without tokens"):
        resampled_means(np.ones(2), np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match="3 units, got 2 counts"):
        resampled_means(np.ones(3), np.ones(2))
