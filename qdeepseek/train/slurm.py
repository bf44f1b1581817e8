"""What a Slurm job tells its processes, and how it goes back to the queue.

srun starts one task a GPU and names it in its environment: SLURM_PROCID (rank), SLURM_LOCALID, SLURM_NTASKS,
SLURM_NNODES. Lightning's SLURMEnvironment makes the rendezvous of them (first host of the node list, port from the
job's id). Its own requeueing is off: it saves inside a signal handler, where another rank may be waiting in a
collective; see callbacks/preemption.py.
"""

import os
import re
import signal
import subprocess

from lightning.pytorch.plugins.environments import SLURMEnvironment

from qdeepseek.train.config import ConfigError

TORCHRUN_NAMES = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}

ENDING = ("COMPLETING", "CANCELLED", "TIMEOUT", "DEADLINE")


class RequeueError(RuntimeError):
    """The job does not go back to the queue; the message says why and what to do."""


def job_id() -> str | None:
    """The id that scontrol takes, ARRAY_TASK for an element of an array; None outside of a job."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def started_by_srun() -> bool:
    """Whether srun made this process one rank; false in a batch script, in interactive shells, and under torchrun."""
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")  # as Lightning has it
    return "SLURM_STEP_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ and not interactive


def adopt_ranks() -> None:
    """Give rank and world size the names that torchrun uses, which the rest of the program reads.

    Raises ConfigError where the job has several tasks and this process is none of them: it would wait for the others.
    """
    tasks = int(os.environ.get("SLURM_NTASKS", 1))
    if started_by_srun():
        os.environ.update({name: os.environ[source] for name, source in TORCHRUN_NAMES.items()})
    elif tasks > 1 and "SLURM_PROCID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ConfigError(
            f"job {job_id()} has {tasks} tasks and this process was not started by srun, so it would wait for the "
            f"others; run `srun python train.py …` in the batch script, as slurm/train.sbatch does"
        )


def shape(devices: int | str, nodes: int) -> tuple[int | str, int]:
    """Devices a node and nodes: as configured, or in a job step, where devices is auto, the job's own.

    Raises ConfigError where several tasks run without --ntasks-per-node, which Lightning needs.
    """
    if not started_by_srun() or devices != "auto":
        return devices, nodes
    tasks = int(os.environ["SLURM_NTASKS"])
    per_node = os.environ.get("SLURM_NTASKS_PER_NODE")
    if per_node is None and tasks > 1:
        raise ConfigError(
            f"job {job_id()} has {tasks} tasks and no --ntasks-per-node; submit it with --nodes=N --ntasks-per-node=M"
        )
    return int(per_node or 1), int(os.environ.get("SLURM_NNODES", 1))


def environments() -> list[SLURMEnvironment]:
    """Lightning's plugins for this process: in a job step, Slurm's environment without its signal handlers."""
    return [SLURMEnvironment(auto_requeue=False)] if started_by_srun() else []


def submitit_signal() -> str | None:
    """The signal by which submitit's job script announces preemption, in a job that submitit started."""
    if os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return None
    return "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        raise RequeueError("scontrol is not on PATH of this node, so the job cannot queue itself again") from error
    except subprocess.TimeoutExpired as error:
        raise RequeueError("scontrol did not answer within 60 s, so the job may not be queued again") from error
    if done.returncode not in (0, -signal.SIGTERM, -signal.SIGKILL):  # requeueing kills the job's scontrol too
        raise RequeueError(
            f"scontrol {' '.join(arguments)}: {done.stderr.strip() or f'exit code {done.returncode}'}; a job may be "
            f"queued again if it was submitted with --requeue and the site allows it (JobRequeue, batch jobs only)"
        )
    return done.stdout


def requeue() -> None:
    """Send this job back to the queue under its own id; Slurm ends its processes at once, so save before.

    Raises RequeueError: no scontrol, refused by the site, or Slurm ends the job already. That is how a job looks that
    its user cancels, until its last process is gone (COMPLETING), and Slurm would revive it.
    """
    job = job_id()
    assert job is not None
    state = re.search(r"JobState=(\w+)", _scontrol("show", "job", job))
    if state is not None and state[1] in ENDING:
        raise RequeueError(
            f"Slurm ends job {job} already (state {state[1]}: cancelled, or past its time limit), so it is not queued "
            f"again; for a time limit the signal must come earlier, as with --signal=USR1@300"
        )
    _scontrol("requeue", job)
