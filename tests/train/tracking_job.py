"""Run by test_tracking.py, two processes over gloo: what a fit tells its loggers under DDP and ZeRO-1/2/3."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from qdeepseek.train.callbacks.fake_quant import FakeQuant
from qdeepseek.train.callbacks.gradient_norm import GradientNorm
from qdeepseek.train.callbacks.layer_statistics import LayerStatistics
from qdeepseek.train.callbacks.throughput import Throughput
from qdeepseek.train.config import OptimConfig
from qdeepseek.train.datamodule import TokenDataModule
from qdeepseek.train.module import FineTune
from qdeepseek.train.strategy import make
from tests.train.test_callbacks import Rows, collate
from tests.train.test_layer_statistics import Kept
from tests.train.zero_job import ZERO, student_of

STEPS, ACCUMULATE = 3, 2


def fit(where: str, model: str, folder: Path) -> list[Any]:
    logger = Kept()
    trainer = L.Trainer(
        max_steps=STEPS, max_epochs=-1, accumulate_grad_batches=ACCUMULATE, gradient_clip_val=0.1, accelerator="cpu",
        devices=2, strategy="ddp" if where == "ddp" else make(ZERO[where], "32-true"), logger=logger,
        log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[FakeQuant(), LayerStatistics(every=1), Throughput(peak_tflops=1.0), GradientNorm()],
        limit_val_batches=0, use_distributed_sampler=False, default_root_dir=folder,
    )  # fmt: skip
    module = FineTune(student_of(model), OptimConfig(lr=1e-3, scale_lr=1e-4, warmup_steps=1), STEPS, stage="qat")
    trainer.fit(module, TokenDataModule(Rows(), Rows(), 2, collate, seed=0))
    return logger.rows


def main(model: str, folder: Path, places: list[str]) -> None:
    torch.set_num_threads(1)
    found = {where: fit(where, model, folder) for where in places}
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","))
