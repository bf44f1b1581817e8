"""Run by test_precision.py: a DDP run of two processes whose gradients are made to differ after their reduction."""

import sys
from pathlib import Path

import lightning as L
import torch

from qdeepseek.train import qat
from tests.train.test_precision import LIVELY, Levels, make_run


class Differ(L.Callback):
    """Notes the batches, and scales this rank's reduced gradients, so that its own statistics are its own."""

    def __init__(self, callback):
        self.batches, self.own, self.callback = [], [], callback

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(int(batch["input_ids"].sum()))

    def on_after_backward(self, trainer, pl_module):
        for number, parameter in enumerate(pl_module.model.parameters()):
            if parameter.grad is not None:
                step = trainer.global_step
                burst = 30 if step in (4, 7) and number % 3 == 0 else (number + step) % 2
                parameter.grad.mul_(1 + trainer.global_rank * burst)
        self.own.append(self.callback._sums().tolist())


def main(folder: Path, model: str, data: str) -> None:
    torch.set_num_threads(1)
    run = make_run(folder, model, data, *LIVELY, "strategy=ddp", "trainer.devices=2", "trainer.accumulate=1")
    callback, levels = run.methods["precision"], Levels()
    differ = Differ(callback)
    run.callbacks = (differ, levels)
    qat.quantise_aware(run)
    rank = torch.distributed.get_rank()
    torch.save(
        {"scheduler": callback.scheduler.state_dict(), "events": callback.events.count, "levels": levels.seen,
         "batches": differ.batches, "own": differ.own}, folder / f"rank{rank}.pt",
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
