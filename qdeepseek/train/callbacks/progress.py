"""A progress bar over optimizer steps; runs with an endless loader have no epoch to show."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm


class StepProgress(ProgressBar):
    """`name  ██████  120/300  loss 1.234`, one line, refreshed at most twice a second, rank 0 only."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self._bar: Any = None
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._bar = tqdm(
            total=trainer.max_steps, initial=trainer.global_step, desc=f"{self.name:<10}", unit="step",
            mininterval=0.5, disable=not self._enabled or not trainer.is_global_zero,
        )  # fmt: skip

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        done = trainer.global_step - self._bar.n
        if done > 0 and self._bar.update(done):
            metrics = self.get_metrics(trainer, pl_module)
            metrics.pop("v_num", None)
            shown = " ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items())
            self._bar.set_postfix_str(shown, refresh=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._bar.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._bar is not None:
            self._bar.close()
