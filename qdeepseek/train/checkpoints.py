"""Checkpoints of a stage: RUN/checkpoints/STAGE/step=N.ckpt, the newest alone, and a link last.ckpt to it.

A plain checkpoint is a file that appears whole. One of ZeRO is a folder to which every rank writes, and counts when
rank 0 has put COMPLETE into it (zero.py). The old one is removed after the new one is complete, so that whenever a run
is killed there is one to go on from.
"""

import shutil
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only

COMPLETE = "complete"
TAG = "checkpoint"  # the folder of a checkpoint's in which Lightning lets DeepSpeed write


class Checkpoints(ModelCheckpoint):
    """ModelCheckpoint that does not save a resumed step once more.

    Lightning would, after the first micro-batch: a checkpoint in the middle of an accumulation, whose gradient the
    next resume would not have.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last step has a checkpoint, whatever the interval: what is exported from one (ZeRO-3) is the end."""
        self.save_now(trainer)

    def save_now(self, trainer: L.Trainer) -> None:
        """Save this optimizer step as an ordinary one, unless it is saved already; every rank calls it."""
        if self._last_global_step_saved != trainer.global_step:
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)


def is_complete(path: Path) -> bool:
    return path.is_file() or (path / COMPLETE).is_file()


def _by_step(folder: Path, name: str) -> list[Path]:
    found = (folder / "checkpoints" / name).glob("step=*.ckpt")
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step=")))


def last_checkpoint(folder: Path, name: str) -> str | None:
    """Newest complete checkpoint of a stage, or None when it has not run."""
    last = folder / "checkpoints" / name / "last.ckpt"
    complete = [path for path in (last, *_by_step(folder, name)) if is_complete(path)]
    return str(complete[-1]) if complete else None


@rank_zero_only
def drop_unfinished(folder: Path, name: str) -> None:
    """Remove folders that a kill left half-written, before anybody writes into them again."""
    for path in _by_step(folder, name):
        if not is_complete(path):
            shutil.rmtree(path)
