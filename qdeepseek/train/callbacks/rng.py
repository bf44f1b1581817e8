"""Random number generators of every rank in the checkpoint: dropout and sampling continue where they stopped."""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback


def rng_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators of this process."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


class RandomState(Callback):
    """Saves all ranks' states (ranks beyond those of the saved run start from their seed)."""

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        states: list[Any] = [rng_state()]
        if trainer.world_size > 1:
            own, states = states[0], [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint["qdeepseek_rng"] = states

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get("qdeepseek_rng", [])
        if trainer.global_rank < len(states):
            self._state = states[trainer.global_rank]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state = self.__dict__.pop("_state", None)
        if state is None:
            return
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
