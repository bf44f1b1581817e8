"""method/compensation=relative: thresholds against the gradient's own past (compensate/relative.py)."""

from qdeepseek.compensate.relative import Relative
from qdeepseek.train.callbacks.compensation import GradientCompensation


class RelativeCompensation(GradientCompensation):
    """alpha of the three points, ratio to the usual that fires, and decay of the usual an optimizer step."""

    def __init__(
        self,
        embedding: float = 0.15,
        down: float = 0.08,
        up: float = 0.12,
        ratio: float = 1.1,
        decay: float = 0.95,
        log_every: int = 50,
    ):
        super().__init__(Relative(embedding, down, up, ratio), log_every, decay)
