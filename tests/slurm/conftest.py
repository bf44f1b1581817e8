"""One Slurm and one sweep on it for all tests of this folder."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm import cluster as slurm

ROOT = Path(__file__).parents[2]
STEPS = 48
STRATEGIES = ("ddp", "zero2")
SHRUNK = [
    f"trainer.steps={STEPS}", "trainer.validate_every=100", "trainer.checkpoint_every=1000", "trainer.log_every=1",
    "trainer.threads=1", "data=sft", "data.max_length=128", "data.batch_size=2", "data.report_sequences=8",
    "data.select_sequences=4", "method.gptq_sequences=4",
]  # fmt: skip
WANDB = ["logger=wandb", "logger.offline=true"]
NODE = ["--gpus-per-node=0", "--ntasks-per-node=2", "--cpus-per-task=1"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    reason = slurm.missing()
    if reason:
        pytest.skip(reason)
    os.environ.update(BIN=str(Path(sys.executable).parent), OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    with slurm.one_node(tmp_path_factory.mktemp("slurm")) as up:
        yield up


@pytest.fixture(scope="session")
def options(tiny_folder, text_rows):
    return [*SHRUNK, f"model.path={tiny_folder}", f"data.path={text_rows}"]


@dataclass(frozen=True)
class Sweep:
    folder: Path
    done: subprocess.CompletedProcess


@pytest.fixture(scope="session")
def sweep(cluster, options, tmp_path_factory):
    """Two jobs of two tasks, one a strategy, as a user launches them; the runs that no signal stops."""
    folder = tmp_path_factory.mktemp("sweeps") / "strategies"
    launcher = ["tasks_per_node=2", "gpus_per_node=0", "cpus_per_task=1", "timeout_min=30"]
    command = [
        sys.executable, "train.py", "--multirun", "hydra/launcher=slurm", f"strategy={','.join(STRATEGIES)}",
        f"hydra.sweep.dir={folder}", *(f"hydra.launcher.{option}" for option in launcher), *options, *WANDB,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=cluster.env, capture_output=True, text=True, timeout=900)
    return Sweep(folder, done)
