"""Run by test_zero_resume.py: runs of both stages under ZeRO, whole, killed and continued, by two processes or one.

arguments: folder, what to do, model, data, then overrides. What to do is a JSON list of [strategy, name, kill], kill a
"STAGE:BATCH" at which both ranks die, or "".
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from qdeepseek.train import qat
from qdeepseek.train.zero import gathered
from tests.train.resume_job import KillAt, composed_run


def overrides(folder: Path, strategy: str, model: str, data: str) -> list[str]:
    return [
        f"model.path={model}", "data=sft", f"data.path={data}", "data.max_length=64", "data.batch_size=2",
        "data.too_long=split", "quant=w4a16_g32", "quant.schemes.main.method.learned=true", f"strategy={strategy}",
        "trainer.steps=8", "trainer.accumulate=2", "trainer.checkpoint_every=2", "trainer.validate_every=3",
        "optim.warmup_steps=3", "qat_optim.warmup_steps=2", "method.delay_steps=1", "method.distill_weight=0.5",
        "trainer.accelerator=cpu", "trainer.devices=2", "method/routing=entropy", "method.routing.log_every=2",
        "method/precision=scheduler", "method.precision.warmup=1", f"run_dir={folder}", f"hydra.run.dir={folder}",
        *(["+strategy.zero_optimization.stage3_param_persistence_threshold=0"] if strategy == "zero1" else
          ["strategy.zero_optimization.stage3_param_persistence_threshold=0"] if strategy == "zero3" else []),
    ]  # fmt: skip


class Losses(qat.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def train(folder: Path, strategy: str, kill: str, model: str, data: str, more: list[str]) -> None:
    run = composed_run([*overrides(folder, strategy, model, data), *more])
    losses = Losses()
    run.callbacks = (losses, KillAt(kill.split(":")[0], int(kill.split(":")[1]))) if kill else (losses,)
    qat.check(run)
    qat.fine_tune(run)
    student = qat.quantise_aware(run)
    with gathered(student.parameters()):
        state = {n: t.detach().clone() for n, t in [*student.named_parameters(), *student.named_buffers()]}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save({"state": state, "losses": losses.losses}, folder / f"final_{torch.distributed.get_world_size()}.pt")


def main(folder: Path, plan: list[list[str]], model: str, data: str, more: list[str]) -> None:
    torch.set_num_threads(1)
    for strategy, name, kill in plan:
        train(folder / name, strategy, kill, model, data, more)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
