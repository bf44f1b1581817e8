"""The seed rule with every constant relative to the tensor itself: thresholds to its own past, the mean to its size.

    g' = g * (1 + alpha * tanh(m / rms(m)))         m = token mean of g, rms(m) over the channels of one mean
    embedding   always
    down        if rms(g) > ratio * usual rms(g)           a gradient larger than usual
    up          if var(g) < usual var(g) / ratio           a gradient flatter than usual

`usual` is the exponential mean of history.py. rms instead of the L2 norm, since the number of an expert's tokens
changes from batch to batch. Nothing fires before a group was observed once.

Scaling the loss by any constant changes neither condition nor factor (accumulation, batch size, fp16's loss scale as
long as it stands still). The factor differs from channel to channel and moves with the batch, so it turns the
gradient: it is a no-op only if alpha = 0, if nothing fires, or if all |m| of a mean are equal and of one sign
(then a factor common to a sequence's rows is left). Decisions use this rank's gradient and the common `usual`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qdeepseek.compensate.seed import scale
from qdeepseek.compensate.tokens import Compensated, Tokens, energy, variance


@dataclass(frozen=True)
class Relative:
    """alpha of each point, and the ratio to the usual that makes a gradient unusual. Raises ValueError if <= 0."""

    embedding: float = 0.15
    down: float = 0.08
    up: float = 0.12
    ratio: float = 1.1

    statistics = 2

    def __post_init__(self) -> None:
        if self.ratio <= 0:
            raise ValueError(f"ratio {self.ratio} must be positive; 1 fires on every gradient beyond the usual")

    def __call__(self, point: str, g: Tensor, tokens: Tokens, usual: Tensor) -> Compensated:
        """Compensates a gradient (.., C) at `point`: embedding, down or up; usual (M, 2): rms and variance."""
        size = tokens.rows(g).clamp_min(1) * g.shape[-1]
        rms, var = (energy(g, tokens) / size).sqrt(), variance(g, tokens)
        if point == "embedding":
            on, alpha = torch.ones_like(rms, dtype=torch.bool), self.embedding
        elif point == "down":
            on, alpha = rms > self.ratio * usual[:, 0], self.down  # False against NaN: nothing observed yet
        else:
            on, alpha = var < usual[:, 1] / self.ratio, self.up
        mean = tokens.mean(g)
        tiny = torch.finfo(g.dtype).tiny
        size_of_mean = mean.square().mean(-1, keepdim=True).sqrt().clamp_min(tiny)
        excess = alpha * torch.tanh(mean / size_of_mean)
        return scale(g, tokens, excess, on.to(g.dtype), torch.stack([rms, var], -1))
