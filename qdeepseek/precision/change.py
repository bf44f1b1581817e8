"""A decision of a precision scheduler."""

from typing import NamedTuple


class Change(NamedTuple):
    """At `step`, group number `group` goes from one rung of its ladder to another (0 is the target).

    statistic  what decided: spike ratio, sensitivity, or the caller's own value
    reason     spike | non-finite | request | calm | end | schedule
    """

    step: int
    group: int
    before: int
    after: int
    statistic: float
    reason: str
