"""Level 1: which fusion group computes at which level, from (step, statistics). Numbers in, numbers out."""

from qdeepseek.precision.change import Change
from qdeepseek.precision.progressive import ProgressiveRule, ProgressiveScheduler
from qdeepseek.precision.spikes import SpikeRule, SpikeScheduler
from qdeepseek.precision.statistic import Statistic, moments

__all__ = [
    "Change", "ProgressiveRule", "ProgressiveScheduler", "SpikeRule", "SpikeScheduler", "Statistic", "moments",
]  # fmt: skip
