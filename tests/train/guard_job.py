"""Run by test_guard.py: two DDP processes; a NaN in the forward of rank 1 alone, an infinite loss with a finite
gradient on rank 1 alone, then an inf in a weight of both."""

import sys
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import torch
from transformers import DeepseekV3ForCausalLM

from qdeepseek.surgery import Recipe, prepare
from qdeepseek.train.callbacks.guard import Guard
from qdeepseek.train.config import OptimConfig
from qdeepseek.train.module import FineTune
from tests.train.test_config import composed
from tests.train.test_guard import EXPERTS, Plant, Probe, data_module, inf_weight, poison


class OnRank1(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        if trainer.global_rank == 1:
            poison(pl_module.model, EXPERTS, [1], trainer.datamodule)
            pl_module.auxiliary["constant"] = self

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.value = torch.inf if batch_idx == 3 else 0.0

    def record(self):
        return nullcontext()

    def loss(self, batch):
        return torch.tensor(self.value)


def main(model_folder: str, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    prepare(model, Recipe.from_config(composed("run_dir=x")["quant"]))
    guard, probe, data = Guard(patience=2), Probe(), data_module()
    trainer = L.Trainer(
        max_steps=9, max_epochs=-1, gradient_clip_val=1.0, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        callbacks=[guard, probe, OnRank1(), Plant(6, inf_weight)], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(FineTune(model, OptimConfig(lr=1e-3, warmup_steps=1), 9), data)
    seen = {"after": probe.after, "events": guard.events, "data": data.batch(0)["input_ids"].tolist()}
    torch.save(seen, folder / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
