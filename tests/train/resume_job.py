"""Run by test_resume.py in a process of its own: both stages of a tiny run, killed at a given micro-batch."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf

from qdeepseek.train import qat

CONF = Path(__file__).parents[2] / "conf"


class KillAt(Callback):
    """SIGKILL before micro-batch `batch` of stage `stage`."""

    def __init__(self, stage: str, batch: int):
        self.stage, self.batch = stage, batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.stage == self.stage and batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def composed_run(overrides: list[str]) -> qat.Run:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("train", overrides=overrides), resolve=True)
    return qat.Run.from_config(config)


def main(overrides: list[str], kill: str) -> None:
    torch.set_num_threads(1)
    run = composed_run(overrides)
    if kill:
        stage, batch = kill.split(":")
        run.callbacks = (KillAt(stage, int(batch)),)
    qat.fine_tune(run)
    student = qat.quantise_aware(run)
    torch.save(student.state_dict(), run.folder / "final.pt")


if __name__ == "__main__":
    main(sys.argv[2:], sys.argv[1])
