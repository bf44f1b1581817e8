"""W&B's logger of a run that a signal may stop.

Slurm sends SIGTERM to every process of a job step, W&B's own among them, which ends at once; whatever is logged after
that raises. The few numbers between the signal and the run's stop are dropped instead: the CSV files have them.
"""

from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import WandbLogger

from qdeepseek.train.stop import StopRequest


class StoppableWandb(WandbLogger):
    """A WandbLogger that records nothing any more when `stop` has seen SIGTERM."""

    def __init__(self, stop: StopRequest, **options: Any):
        super().__init__(**options)
        self._stop = stop

    @property
    def experiment(self) -> Any:
        return _DummyExperiment() if self._stop.signal == "SIGTERM" else super().experiment
