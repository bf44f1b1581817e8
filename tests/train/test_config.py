"""Every config composes and parses; wrong values are refused with a message that names the key."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from qdeepseek.surgery import Recipe
from qdeepseek.train import artifacts
from qdeepseek.train.config import ConfigError, ExportConfig, MethodConfig, OptimConfig, build
from qdeepseek.train.data import DataConfig
from qdeepseek.train.loggers import LoggerConfig
from qdeepseek.train.methods import GROUPS as METHODS
from qdeepseek.train.methods import split
from qdeepseek.train.models import ModelConfig
from qdeepseek.train.optim import lr_factor
from qdeepseek.train.qat import Run
from qdeepseek.train.run import TrainerConfig, ranks_of
from qdeepseek.train.stop import StopConfig

CONF = Path(__file__).parents[2] / "conf"
GROUPS = ["model", "data", "quant", "method", "optim", "trainer", "strategy", "logger", "export", "experiment"]
GROUPS += [f"method/{group}" for group in METHODS]


def composed(*overrides: str) -> dict:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("train", overrides=list(overrides)), resolve=True)


@pytest.mark.parametrize(
    "choice", [f"{g}={f.stem}" for g in GROUPS for f in sorted((CONF / g).glob("*.yaml"))], ids=str
)
def test_every_choice_composes_and_parses(choice):
    run = Run.from_config(composed(choice, "run_dir=x"))
    assert isinstance(run.recipe, Recipe)


def test_every_field_stands_in_its_config_file():
    config = composed("run_dir=x")
    owners = {
        "model": ModelConfig, "method": MethodConfig, "optim": OptimConfig, "qat_optim": OptimConfig,
        "trainer": TrainerConfig, "export": ExportConfig, "stop": StopConfig,
    }  # fmt: skip
    config["method"], groups = split(config["method"])
    assert set(groups) == {"guard"}
    for group, owner in owners.items():
        assert set(config[group]) == {f.name for f in dataclasses.fields(owner)}, group
    assert set(composed("logger=wandb", "run_dir=x")["logger"]) == {f.name for f in dataclasses.fields(LoggerConfig)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 1e-3, "learning_rate": 1}, "optim: unknown key learning_rate; known keys are lr, scale_lr"),
        ({}, "optim: key lr is missing"),
        ({"lr": -1}, "optim: lr -1 must be positive"),
        ({"lr": 1, "schedule": "step"}, "schedule 'step' is unknown; use one of cosine"),
    ],
)
def test_wrong_values_name_the_key(values, message):
    with pytest.raises(ConfigError, match=message):
        build(OptimConfig, values, "optim")


def test_data_of_an_unknown_kind_or_key():
    with pytest.raises(ConfigError, match=r"data\.kind 'web' is unknown; use one of stdlib, sft"):
        DataConfig.parse({"kind": "web"})
    with pytest.raises(ConfigError, match="data: unknown key lenght; known keys are length, stride"):
        DataConfig.parse({"kind": "stdlib", "lenght": 3})


def test_a_folder_keeps_its_configuration(tmp_path):
    config = composed("run_dir=x")
    artifacts.check_same(config, {**config, "run_dir": "y", "logger": {"kind": "wandb"}}, tmp_path)
    with pytest.raises(ConfigError, match="begun with another configuration: seed 0 -> 1; give the same values"):
        artifacts.check_same(config, {**config, "seed": 1}, tmp_path)


def test_a_folder_is_continued_by_other_ranks_that_read_as_much_together(tmp_path):
    config = composed("run_dir=x", "data.batch_size=4", "trainer.devices=2")
    before = {**config, "ranks": 2}
    one = composed("run_dir=x", "data.batch_size=8", "trainer.devices=1")
    artifacts.check_same(before, {**one, "ranks": 1}, tmp_path)
    with pytest.raises(ConfigError, match=r"data.batch_size 4 -> 8; ranks 2 -> 4"):
        artifacts.check_same(before, {**one, "ranks": 4}, tmp_path)
    with pytest.raises(ConfigError, match=r"ranks 2 -> 1"):
        artifacts.check_same(before, {**config, "ranks": 1}, tmp_path)


@pytest.mark.parametrize(
    ("values", "ranks"), [({}, 1), ({"devices": 4, "nodes": 2}, 8), ({"devices": "0,3"}, 2), ({"devices": "2"}, 2)]
)
def test_ranks_are_known_before_the_processes(values, ranks, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks_of(TrainerConfig(steps=1, accelerator="cpu", **values)) == ranks
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert ranks_of(TrainerConfig(steps=1)) == 16


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_schedules_warm_up_and_end_at_zero(schedule):
    factor = lr_factor(OptimConfig(lr=1.0, warmup_steps=4, schedule=schedule), 20)
    values = [factor(s) for s in range(21)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert values[20] == pytest.approx(0, abs=1e-12)
    assert all(a >= b for a, b in pairwise(values[4:]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devices": 0}, "trainer: devices 0 must be at least 1"),
        ({"precision": "int3"}, "trainer: precision 'int3' is unknown; use one of 32-true, bf16-mixed"),
        ({"steps": "abc"}, "trainer: steps 'abc' must be a whole number"),
    ],
)
def test_a_trainer_that_cannot_start_is_refused_before_the_data(values, message):
    with pytest.raises(ConfigError, match=message):
        build(TrainerConfig, {"steps": 1, **values}, "trainer")
