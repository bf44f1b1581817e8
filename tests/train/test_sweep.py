"""conf/sweep/method.yaml: what a W&B agent would start is accepted, whatever it draws; jobs of a sweep are grouped."""

import itertools
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from qdeepseek.train import methods
from qdeepseek.train.qat import Run

CONF = Path(__file__).parents[2] / "conf"
SWEEP = yaml.safe_load((CONF / "sweep" / "method.yaml").read_text())


def drawn():
    """Every combination of the sweep's values, by parameter."""
    values = [parameter["values"] for parameter in SWEEP["parameters"].values()]
    return [dict(zip(SWEEP["parameters"], combination)) for combination in itertools.product(*values)]


def command_of(draw):
    """Arguments of train.py as W&B's agent puts them into the command."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    macros = create_sweep_command_args({"args": {name: {"value": value} for name, value in draw.items()}})
    words = SWEEP["command"]
    assert words[:3] == ["${env}", "${interpreter}", "${program}"] and words[-1] == "${args_no_hyphens}"
    return [*words[3:-1], *macros["args_no_hyphens"]]


@pytest.mark.slow
def test_every_combination_composes_and_suits_the_model(tiny_model):
    combinations = drawn()
    assert len(combinations) == 3 * 2 * 2 * 3 * 3 * 3
    composed = {}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for draw in combinations:  # Hydra once for each choice of groups, its values set as its overrides are
            groups = tuple(value for name, value in draw.items() if "/" in name)
            if groups not in composed:
                composed[groups] = compose("train", overrides=[*command_of(draw), "run_dir=x"])
            config = composed[groups]
            for name, value in draw.items():
                if "/" not in name:
                    OmegaConf.update(config, name, value)
            run = Run.from_config(OmegaConf.to_container(config, resolve=True))
            assert run.logger.kind == "wandb" and run.data_config.loader.evaluate == "select"
            assert run.qat_optim.lr == draw["qat_optim.lr"] and run.method.distill_weight > 0
            on = {name.split("/")[1] for name, value in draw.items() if "/" in name and value != "off"}
            assert set(run.methods) == on | {"guard"}
            methods.check(run.methods, run, tiny_model)


def test_the_metric_of_the_sweep_is_one_that_a_run_logs():
    assert SWEEP["metric"] == {
        "name": "qat/select_loss",
        "goal": "minimize",
    }  # as in docs/wandb.md
