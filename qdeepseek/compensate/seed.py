"""The seed rule: a gradient grows or shrinks with the sign of its token mean, under an absolute condition.

    g' = g * (1 + alpha * tanh(m))        m = mean of g over the tokens (dim 1 of (B, L, C)), kept
    embedding   output of the embedding           always                alpha 0.15
    down        input of down_proj                if ||g||_2 > 3.2      alpha 0.08
    up          output of up_proj                 if var(g) < 0.01      alpha 0.12

Inside fused experts m, the norm and the variance are those of one expert's rows. The variance is divided by the
number of elements.

When it does nothing. |g' - g| <= alpha * max|m| * |g|, and m is a mean of loss gradients. Measured on the shipped model
(QAT with distillation, 4 x 256 tokens): max|m| 5e-5, so the factor is 1 within 1e-5; the largest norm is 0.006 and the
variance at up 2e-11, so `down` never fires and `up` always does. And any factor that is
constant in time is cancelled by Adam: for g' = c * g, c > 0,
    m'/(sqrt(v') + eps) = c m/(c sqrt(v) + eps) = m/(sqrt(v) + eps/c)
which is exact for eps = 0, elementwise, so also for a constant factor per row or channel. What is left is c's change
within Adam's memory, 1/(1 - beta2) steps. The thresholds are absolute: they depend on the loss scale, on the tokens of
a micro-batch and on the accumulation. See relative.py, row.py and cage.py for forms that act.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qdeepseek.compensate.tokens import Compensated, Tokens, energy, variance


@dataclass(frozen=True)
class Seed:
    """alpha of each point, and the thresholds of `down` (L2 norm) and `up` (variance)."""

    embedding: float = 0.15
    down: float = 0.08
    up: float = 0.12
    norm: float = 3.2
    variance: float = 0.01

    statistics = 0

    def __call__(self, point: str, g: Tensor, tokens: Tokens, usual: Tensor) -> Compensated:
        """Compensates a gradient (.., C) at `point`: embedding, down or up. `usual` is not read."""
        tanh = torch.tanh(tokens.mean(g))
        if point == "embedding":
            fired = torch.ones_like(tokens.rows(g))
            alpha = self.embedding
        elif point == "down":
            fired = (energy(g, tokens).sqrt() > self.norm).to(g.dtype)
            alpha = self.down
        else:
            fired = (variance(g, tokens) < self.variance).to(g.dtype)
            alpha = self.up
        return scale(g, tokens, alpha * tanh, fired, g.new_empty(len(fired), 0))


def scale(g: Tensor, tokens: Tokens, excess: Tensor, fired: Tensor, observed: Tensor) -> Compensated:
    """g * (1 + excess) where fired; excess is like a token mean, fired (M,) is 0 or 1.

    A group that did not fire keeps its gradient bit for bit, also where it is not finite.
    """
    on = tokens.spread(fired) > 0
    grad = torch.where(on, g * (1 + tokens.along(excess)), g)
    return Compensated(grad, fired, 1 + fired * tokens.average(excess), observed)
