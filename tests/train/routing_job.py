"""Two steps of a tiny model whose weights stand still, for test_routing.py: alone, or by two processes with DDP."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import AutoModelForCausalLM

from qdeepseek.train.callbacks.routing import Routing
from qdeepseek.train.config import OptimConfig
from qdeepseek.train.datamodule import TokenDataModule
from qdeepseek.train.module import FineTune

OPTIONS: dict[str, Any] = {
    "entropy": {"weight": 1.0, "target": 0.999}, "bias_speed": 2**-10, "entropy_and_bias": True,
    "temperature": {"target": 0.5, "speed": 0.01}, "gradient": {"max_norm": 0.025},
}  # fmt: skip


class PaddedRows(torch.utils.data.Dataset):
    """Rows with 0 to 9 padded tokens, all of them with loss: ranks differ in real tokens, not in trained ones."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(16) < 16 - index % 10).long()}


def collate(items: Any) -> dict[str, torch.Tensor]:
    return {k: torch.stack([i[k] for i in items]) for k in items[0]}


class Gradients(L.Callback):
    """All gradients of the last step, by name."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}


def train(folder: Path, devices: int, scope: str) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    routing = Routing(**{**OPTIONS, "entropy": {**OPTIONS["entropy"], "scope": scope}})
    spy = Gradients()
    trainer = L.Trainer(
        max_steps=2, max_epochs=-1, callbacks=[routing, spy], accelerator="cpu", devices=devices, logger=False,
        strategy="ddp" if devices > 1 else "auto", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False,
    )  # fmt: skip
    data = TokenDataModule(PaddedRows(), PaddedRows(), 8 // devices, collate)
    trainer.fit(FineTune(model, OptimConfig(lr=1e-30, warmup_steps=0), 2), data)
    biases = [r.e_score_correction_bias for r in routing.routers.values()]
    weights = [r.weight.detach() for r in routing.routers.values()]
    return {"rank": trainer.global_rank, "gradients": spy.seen, "biases": biases, "weights": weights,
            "facts": routing.facts()}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {scope: train(Path(sys.argv[1]), 2, scope) for scope in ("global", "local")}
    torch.save(found, Path(sys.argv[2]) / f"rank{found['global']['rank']}.pt")
