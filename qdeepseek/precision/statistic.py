"""Mean and variance of a group's gradient from sums that add up over tensors and ranks.

mean = Σg / n      var = Σg² / n − mean²      (float64; not below 0)
"""

import math
from collections.abc import Iterable
from typing import NamedTuple


class Statistic(NamedTuple):
    """Mean and variance over all elements of one group's weight gradient."""

    mean: float
    var: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.mean) and math.isfinite(self.var)


def moments(sums: Iterable[float], squares: Iterable[float], counts: Iterable[int]) -> list[Statistic]:
    """One Statistic for each group from Σg, Σg² and the number of elements; a non-finite sum gives a non-finite one."""
    found = []
    for total, square, n in zip(sums, squares, counts, strict=True):
        mean = total / n
        var = square / n - mean * mean
        found.append(Statistic(mean, max(0.0, var) if math.isfinite(var) else math.nan))
    return found
