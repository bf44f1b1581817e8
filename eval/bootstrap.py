"""Bootstrap intervals over units of held-out text (documents or sequences), paired across models.

A mean is a ratio of sums over units, m_k = Σ_u s_ku / Σ_u n_u. A resample draws U units with replacement, the
same ones for every model k: most of the spread between documents is common to the models and cancels in
differences. Intervals are percentiles of the resampled statistic (Efron & Tibshirani 1993, ch. 13).

Gap recovered = (RTN − QAT) / (RTN − FP_ft), each term a mean on the same tokens: 1 when training with
quantisation in the loop costs nothing, 0 when it is no better than rounding the fine-tuned model. The
denominator is never taken against the untuned model. Where its interval reaches zero the ratio says nothing,
and is reported as absent with the reason.   U units, K models, R resamples.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; `value` is None where it cannot be stated, and `reason` says why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None

    @property
    def interval(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def resampled_means(
    sums_KU: Array, counts_U: Array, *, resamples: int = 2000, seed: int = 0, max_elements: int = 2**22
) -> Array:
    """Means (K, R) over `resamples` draws of units with replacement, the same draws for all K rows.

    `max_elements` bounds the drawn multiplicities held at once; the draws do not depend on it.
    """
    sums_KU, counts_U = np.atleast_2d(np.asarray(sums_KU, float)), np.asarray(counts_U, float)
    units = len(counts_U)
    if sums_KU.shape[1] != units or units == 0 or (counts_U <= 0).any():
        raise ValueError(
            f"bootstrap needs one positive token count for each of the {sums_KU.shape[1]} units, "
            f"got {units} counts with minimum {counts_U.min() if units else None}; drop units without tokens"
        )
    generator = np.random.default_rng(seed)
    means = []
    rows = max(1, max_elements // units)
    for start in range(0, resamples, rows):
        n = min(rows, resamples - start)
        drawn_RU = generator.integers(units, size=(n, units)) + units * np.arange(n)[:, None]
        times_RU = np.bincount(drawn_RU.ravel(), minlength=n * units).reshape(n, units).astype(float)
        means.append((times_RU @ sums_KU.T) / (times_RU @ counts_U)[:, None])
    return np.concatenate(means).T


def percentile_interval(draws_R: Array, level: float = LEVEL) -> tuple[float, float]:
    """Central interval that holds `level` of the draws."""
    low, high = np.quantile(draws_R, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def estimate(value: float, draws_R: Array, level: float = LEVEL) -> Estimate:
    """`value` with the percentile interval of its resamples."""
    return Estimate(value, *percentile_interval(draws_R, level))


def gap_recovered(
    rtn: tuple[float, Array],
    fp_ft: tuple[float, Array],
    candidate: tuple[float, Array],
    *,
    unit: str = "nats",
    level: float = LEVEL,
) -> Estimate:
    """(rtn − candidate) / (rtn − fp_ft) with its paired interval.

    Each argument is (mean, its paired resamples (R,)). Absent, with the reason, where the interval of
    rtn − fp_ft is not above zero.
    """
    gap, gap_R = rtn[0] - fp_ft[0], rtn[1] - fp_ft[1]
    low, high = percentile_interval(gap_R, level)
    if gap <= 0 or low <= 0:
        return Estimate(
            None,
            reason=f"rounding the fine-tuned model costs {gap:+.2g} {unit} ({low:+.2g} to {high:+.2g}), "
            f"which is not clearly above zero: there is no gap to recover; use more held-out text or fewer bits",
        )
    some = gap_R > 0  # all but at most (1 - level) / 2 of the draws, by the test above
    return estimate((rtn[0] - candidate[0]) / gap, (rtn[1] - candidate[1])[some] / gap_R[some], level)
