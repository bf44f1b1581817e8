"""A signal ends a fit at the end of an optimizer step; started again, the run is that of one never stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import psutil
import pytest
import torch

from qdeepseek.train import slurm
from qdeepseek.train.callbacks.preemption import Agreement
from qdeepseek.train.config import ConfigError, OptimConfig
from qdeepseek.train.datamodule import TokenDataModule
from qdeepseek.train.module import FineTune
from qdeepseek.train.run import TrainerConfig, build_trainer, fit, last_checkpoint
from qdeepseek.train.stop import RESUMABLE, Stopped, StopRequest, stoppable
from tests.train.test_callbacks import Rows, collate

ROOT = Path(__file__).parents[2]
STOP = {"signals": ["SIGUSR1", "SIGTERM"], "requeue": True}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2",
}  # fmt: skip


class Kill(L.Callback):
    """Sends `number` to this process and those it started, as Slurm does to a job step, before micro-batch `batch`."""

    def __init__(self, number, batch):
        self.number, self.batch = number, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            this = psutil.Process()
            for process in (*this.children(recursive=True), this):
                process.send_signal(self.number)


@pytest.fixture
def environment(monkeypatch):
    """Sets variables; none of Slurm's are there from outside. What adopt_ranks and stoppable leave is undone."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    for name in [*os.environ, *slurm.TORCHRUN_NAMES]:
        if name.startswith(("SLURM_", "SUBMITIT_")) or name in slurm.TORCHRUN_NAMES:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
    yield lambda **values: [monkeypatch.setenv(name, value) for name, value in values.items()]
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(model, folder, stop=None, callbacks=(), workers=0):
    """Four optimizer steps of two micro-batches."""
    config = TrainerConfig(steps=4, accumulate=2, checkpoint_every=1000, accelerator="cpu", devices=1)
    module = FineTune(model, OptimConfig(lr=1e-3), 4, stage="qat")
    trainer = build_trainer(config, folder, "qat", callbacks=list(callbacks), stop=stop, validate=False)
    fit(trainer, module, TokenDataModule(Rows(), Rows(), 2, collate, seed=0, workers=workers), folder, "qat")
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_within_an_accumulation_stops_at_the_steps_end_and_resumes_exactly(
    tiny_model, tmp_path, number, capsys, environment
):
    start = {name: tensor.clone() for name, tensor in tiny_model.state_dict().items()}
    whole = run(tiny_model, tmp_path / "whole")
    tiny_model.load_state_dict(start)
    folder, before = tmp_path / "broken", signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, stoppable({"stop": STOP, "run_dir": folder}) as stop:
        run(tiny_model, folder, stop, [Kill(number, 2)], workers=1)  # in the first half of step 2
    assert ended.value.code == RESUMABLE == 75 and signal.getsignal(number) is before
    said = f"stopped by {number.name} after step 2 of 4 of qat, all of it saved in {folder}; to continue, give the same"
    assert said in capsys.readouterr().err
    checkpoint = torch.load(last_checkpoint(folder, "qat"), weights_only=False)
    assert checkpoint["global_step"] == 2
    tiny_model.load_state_dict(start)
    resumed = run(tiny_model, folder, StopRequest())
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_signal_before_the_fit_stops_it_before_its_first_step(tiny_model, tmp_path):
    with pytest.raises(Stopped, match="before step 1"):
        run(tiny_model, tmp_path, StopRequest(signal="SIGUSR1"))
    assert last_checkpoint(tmp_path, "qat") is None


def test_a_stage_ends_the_run_only_where_no_rank_waits(environment):
    StopRequest().stage_ended("export")
    environment(WORLD_SIZE="2")
    request = StopRequest(signal="SIGUSR1")
    request.stage_ended("data")  # the fit that follows agrees on it
    request.alone = True
    with pytest.raises(Stopped, match="after stage export"):
        request.stage_ended("export")


def test_without_scontrol_the_job_keeps_its_checkpoint_and_fails(environment, tmp_path, capsys, monkeypatch):
    environment(**{**SLURM, "SLURM_PROCID": "0"}, PATH=str(tmp_path))
    with pytest.raises(SystemExit) as ended, stoppable({"stop": STOP, "run_dir": tmp_path}):
        raise Stopped("after step 2 of 4 of qat")
    assert ended.value.code == RESUMABLE
    assert "error: scontrol is not on PATH of this node" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # the last words are not cut short


def test_job_id_ranks_and_shape_come_from_slurm(environment):
    assert slurm.job_id() is None and slurm.shape("auto", 1) == ("auto", 1) and slurm.environments() == []
    environment(**SLURM)
    assert slurm.job_id() == "7" and slurm.shape("auto", 1) == (2, 2) and slurm.shape(1, 1) == (1, 1)
    (plugin,) = slurm.environments()
    assert plugin.auto_requeue is False and plugin.global_rank() == 3
    slurm.adopt_ranks()
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["3", "1", "4"]
    environment(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2")
    assert slurm.job_id() == "5_2"


def test_wrong_launches_are_refused(environment, monkeypatch):
    environment(**SLURM)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(ConfigError, match="job 7 has 4 tasks and no --ntasks-per-node"):
        slurm.shape("auto", 1)
    monkeypatch.delenv("SLURM_STEP_ID")  # the batch script itself
    with pytest.raises(ConfigError, match="job 7 has 4 tasks and this process was not started by srun"):
        slurm.adopt_ranks()
    with (
        pytest.raises(ConfigError, match="stop: signal 'SIGFOO' cannot be handled here; use one of"),
        stoppable({"stop": {"signals": ["SIGFOO"]}, "run_dir": "x"}),
    ):
        pass


def test_submitits_own_signal_is_taken_over(environment):
    environment(SUBMITIT_EXECUTOR="slurm")
    before = signal.getsignal(signal.SIGUSR2)
    with stoppable({"stop": STOP, "run_dir": "x"}) as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.signal == "SIGUSR2"
    assert signal.getsignal(signal.SIGUSR2) is before


def test_wandb_gets_nothing_once_sigterm_has_ended_its_process(tmp_path):
    """In a process of its own: W&B does not start again where its service was killed."""
    done = subprocess.run(
        [sys.executable, "-c", AFTER_SIGTERM, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]


AFTER_SIGTERM = """
import signal, sys, time
from pathlib import Path
import psutil
from qdeepseek.train.loggers import LoggerConfig, wandb_logger
from qdeepseek.train.stop import StopRequest, close_wandb
from tests.train.wandb_file import read

stop = StopRequest()
logger = wandb_logger(LoggerConfig(kind="wandb", offline=True), Path(sys.argv[1]), {}, stop)
logger.log_metrics({"a": 1.0}, 0)
time.sleep(3)
stop.handle(signal.SIGTERM, None)
ended = [process for process in psutil.Process().children() if process.name().startswith("wandb")]
assert ended, "W&B has a process"
for process in ended:
    process.terminate()
    process.wait(20)
logger.log_metrics({"a": 2.0}, 1)
logger.experiment.log({"b": 1.0})
logger.experiment.summary["c"] = 1.0
close_wandb()
(file,) = Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")
assert read(file).run["run_id"] and read(file).values("a") == [1.0], "what was logged before is in the file"
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_flag_is_read_one_step_late_and_the_host_does_not_wait(tmp_path):
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        agreed = Agreement(torch.device("cuda", 0), 2)
        torch.cuda.set_sync_debug_mode("error")
        assert [agreed(flag) for flag in (False, True, False, False)] == [False, False, True, False]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.distributed.destroy_process_group()
