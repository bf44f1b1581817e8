"""What is usual for a tensor: an exponential mean of statistics of its gradient, one row a group.

    usual <- decay * usual + (1 - decay) * mean of this step's observations       NaN before the first one

A group that was not observed in a step (an expert without tokens), or only with values that are not finite, keeps
what it has. One update an optimizer step, from the observations of all micro-batches and all ranks, so that the
table is the same on every rank and no rank's order of events is in it.
"""

import torch
from torch import Tensor


def observe_(total: Tensor, observed: Tensor, present: Tensor) -> None:
    """Add one gradient's statistics (M, k) of the groups that are present (M,) to total (M, k + 1); last: a count."""
    present = (present > 0) & observed.isfinite().all(-1)
    total[:, :-1] += torch.where(present[:, None], observed, 0.0)
    total[:, -1] += present


def update_(usual: Tensor, total: Tensor, decay: float) -> None:
    """Move usual (M, k) towards the mean of total (M, k + 1), in place."""
    count = total[:, -1:]
    mean = total[:, :-1] / count.clamp_min(1)
    moved = torch.where(usual.isnan(), mean, torch.lerp(mean, usual, decay))
    usual.copy_(torch.where(count > 0, moved, usual))
