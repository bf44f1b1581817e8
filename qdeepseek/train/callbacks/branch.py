"""Saves the unquantised model at the step where quantisation-aware training takes off."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from qdeepseek.train.save import save_model


class SaveBranch(Callback):
    """Writes a `save_pretrained` folder after optimizer step `step`; step 0 is before the first."""

    def __init__(self, step: int, folder: Path, tokenizer: PreTrainedTokenizerBase):
        self.step, self.folder, self.tokenizer = step, folder, tokenizer

    def _save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == self.step and not self.folder.exists():
            save_model(pl_module.model, self.tokenizer, self.folder)  # type: ignore[arg-type]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._save(trainer, pl_module)
