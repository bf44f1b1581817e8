"""Compensation per row: tokens with a large gradient count more (alpha > 0) or less (alpha < 0), the length stays.

    c_s  = 1 + alpha * (r_s^2 - r^2) / (r_s^2 + r^2)      r_s rms of row s, r rms of its group (tensor or expert)
    g'   = c_s g_s * ||g|| / ||c g||                      norms over the group

(x^2 - 1)/(x^2 + 1) is tanh(ln x), so the factor depends on how many times larger than usual a row is, and lies in
(1 - |alpha|, 1 + |alpha|). With `width` the same is done for each group of `width` channels of a row.

Why this acts under Adam: the gradient of a weight is the sum over tokens of g_s x_s^T, and weighting its terms turns
it. A factor per row of the *weight* would not: it is constant or slow in time, and Adam cancels it (see seed.py).
A no-op, up to rounding, if alpha = 0, or if all rows (or their groups) have one rms: the group's gradient is then
returned unchanged. Nothing is remembered from step to step; decisions use this rank's tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qdeepseek.compensate.tokens import Compensated, Tokens, energy


@dataclass(frozen=True)
class Row:
    """alpha of each point, in (-1, 1), and the channels that share a factor (None: the whole row).

    Raises ValueError for an alpha outside of (-1, 1), which could turn a row around.
    """

    embedding: float = 0.15
    down: float = 0.08
    up: float = 0.12
    width: int | None = None

    statistics = 0

    def __post_init__(self) -> None:
        for name in ("embedding", "down", "up"):
            if not -1 < getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must lie in (-1, 1), or a row's gradient turns around")
        if self.width is not None and self.width < 1:
            raise ValueError(f"width {self.width} must be at least 1, or null for whole rows")

    def __call__(self, point: str, g: Tensor, tokens: Tokens, usual: Tensor) -> Compensated:
        """Compensates a gradient (.., C) at `point`: embedding, down or up. `usual` is not read.

        Raises ValueError if `width` does not divide C.
        """
        channels = g.shape[-1]
        width = channels if self.width is None else self.width
        if channels % width:
            raise ValueError(f"width {width} does not divide the {channels} channels at `{point}`; use null")
        tiny = torch.finfo(g.dtype).tiny
        rows = tokens.rows(g).clamp_min(1)
        before = energy(g, tokens)
        mean_square = tokens.spread(before / (rows * channels))
        blocks = g.unflatten(-1, (-1, width))  # (.., C / width, width)
        square = blocks.square().mean(-1)
        tanh = (square - mean_square) / (square + mean_square).clamp_min(tiny)
        factor = 1 + getattr(self, point) * tanh
        grad = (blocks * factor.unsqueeze(-1)).flatten(-2)
        length = (before / energy(grad, tokens).clamp_min(tiny)).sqrt()
        length = torch.where(before > 0, length, 1.0)
        fired = tokens.sum((tanh > 0).to(g.dtype).mean(-1)) / rows
        applied = length * tokens.sum(factor.mean(-1)) / rows
        return Compensated(grad * tokens.spread(length), fired, applied, g.new_empty(len(rows), 0))
