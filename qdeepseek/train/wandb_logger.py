"""W&B's logger of a run that a signal may stop.

Slurm sends SIGTERM to every process of a job step, W&B's own among them, which ends at once; whatever is logged after
that raises. The few numbers between the signal and the run's stop are dropped instead: the CSV files have them.
"""

from typing import Any

from lightning.pytorch.loggers import WandbLogger

from qdeepseek.train.stop import StopRequest


class _Silence:
    """Takes any call, attribute and item of a W&B run, and does nothing."""

    def __getattr__(self, name: str) -> "_Silence":
        return self

    def __call__(self, *args: Any, **options: Any) -> "_Silence":
        return self

    def __getitem__(self, key: Any) -> "_Silence":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class StoppableWandb(WandbLogger):
    """A WandbLogger that records nothing any more when `stop` has seen SIGTERM."""

    def __init__(self, stop: StopRequest, **options: Any):
        super().__init__(**options)
        self._stop = stop

    @property
    def experiment(self) -> Any:
        return _Silence() if self._stop.signal == "SIGTERM" else super().experiment
