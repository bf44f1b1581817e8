"""Run twice by test_compensation.py, as rank 0 and 1 of one group: a short fit with every kind of compensation.

Saves, a kind and rank, the trained parameters, what the callback remembers and what it observed in the first step.
"""

import os
import sys
from pathlib import Path

import lightning as L
import torch
from transformers import AutoModelForCausalLM

from qdeepseek.surgery import Recipe, prepare
from qdeepseek.train.callbacks.compensation_cage import Cage
from qdeepseek.train.callbacks.compensation_lsq import ScaleGradients
from qdeepseek.train.callbacks.compensation_relative import RelativeCompensation
from qdeepseek.train.callbacks.compensation_row import RowCompensation
from qdeepseek.train.callbacks.compensation_seed import SeedCompensation
from qdeepseek.train.config import OptimConfig
from qdeepseek.train.datamodule import TokenDataModule
from qdeepseek.train.module import FineTune
from tests.train.test_callbacks import Rows, collate
from tests.train.test_config import composed

KINDS = {
    "seed": lambda: SeedCompensation(norm=1e-4),
    "relative": lambda: RelativeCompensation(ratio=1.0, decay=0.5),
    "row": lambda: RowCompensation(width=32),
    "cage": lambda: Cage(strength=500.0, silence=0.3),
    "lsq": lambda: ScaleGradients(limit=0.5),
}


class FirstStep(L.Callback):
    """What `watched` observed on this rank in the first step, before it is reduced and cleared."""

    def __init__(self, watched):
        self.watched, self.observed = watched, None

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 1 and self.observed is None:
            self.observed = getattr(self.watched, "_observed", torch.empty(0)).clone()


def main(model: str, out: Path) -> None:
    torch.set_num_threads(1)
    recipe = Recipe.from_config(composed("run_dir=x")["quant"])
    for kind, make in KINDS.items():
        L.seed_everything(0, verbose=False)
        student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        student.gradient_checkpointing_enable({"use_reentrant": False})
        prepare(student, recipe)
        callback = make()
        spy = FirstStep(callback)
        trainer = L.Trainer(
            max_steps=3, max_epochs=-1, accumulate_grad_batches=2, callbacks=[spy, callback], accelerator="cpu",
            devices=2, strategy="ddp", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False, gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(FineTune(student, OptimConfig(lr=1e-3), 3), TokenDataModule(Rows(), Rows(), 2, collate, seed=0))
        saved = {
            "parameters": {name: p.detach() for name, p in student.named_parameters()},
            "state": callback.state_dict(), "observed": spy.observed,
        }  # fmt: skip
        torch.save(saved, out / f"{kind}.{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
