"""The trainer that every stage of every run gets."""

from contextlib import nullcontext

import torch

from qdeepseek.surgery import Recipe, prepare
from qdeepseek.train.callbacks.guard import Guard
from qdeepseek.train.config import OptimConfig
from qdeepseek.train.module import FineTune
from qdeepseek.train.run import BF16Mixed, TrainerConfig, build_trainer
from tests.train.test_config import composed
from tests.train.test_guard import Plant, data_module


def test_bf16_mixed_clips_and_skips_in_the_trainer_of_every_run(tiny_model, tmp_path):
    prepare(tiny_model, Recipe.from_config(composed("run_dir=x")["quant"]))
    config = TrainerConfig(steps=2, precision="bf16-mixed", accelerator="cpu", devices=1, checkpoint_every=9)
    guard, data = Guard(), data_module()
    poisoned = Plant(2, lambda pl_module: pl_module.auxiliary.update(bad=Infinite()))
    trainer = build_trainer(config, tmp_path, "train", callbacks=[guard, poisoned], validate=False)
    trainer.fit(FineTune(tiny_model, OptimConfig(lr=1e-3, warmup_steps=0), 2), data)
    assert [event["step"] for event in guard.events] == [2]
    assert isinstance(trainer.precision_plugin, BF16Mixed)


class Infinite:
    """An auxiliary loss that is infinite, with a finite gradient."""

    def record(self):
        return nullcontext()

    def loss(self, batch):
        return torch.tensor(torch.inf)
