"""method/compensation=row: tokens weighted by the size of their gradient (compensate/row.py)."""

from qdeepseek.compensate.row import Row
from qdeepseek.train.callbacks.compensation import GradientCompensation


class RowCompensation(GradientCompensation):
    """alpha of the three points, and the channels that share a factor (None: all of a row)."""

    def __init__(
        self,
        embedding: float = 0.15,
        down: float = 0.08,
        up: float = 0.12,
        width: int | None = None,
        log_every: int = 50,
    ):
        super().__init__(Row(embedding, down, up, width), log_every)
