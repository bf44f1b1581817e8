"""method/compensation=seed: the seed rule (compensate/seed.py, which says when it does nothing)."""

from qdeepseek.compensate.seed import Seed
from qdeepseek.train.callbacks.compensation import GradientCompensation


class SeedCompensation(GradientCompensation):
    """alpha of embedding output, down_proj input and up_proj output, and the absolute thresholds."""

    def __init__(
        self,
        embedding: float = 0.15,
        down: float = 0.08,
        up: float = 0.12,
        norm: float = 3.2,
        variance: float = 0.01,
        log_every: int = 50,
    ):
        super().__init__(Seed(embedding, down, up, norm, variance), log_every)
