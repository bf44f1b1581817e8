"""A real Slurm of one node in a folder: munged, slurmctld and slurmd as children of this process, on free ports.

`python -m tests.slurm.cluster FOLDER` keeps one up for trials by hand until Ctrl-C and prints its SLURM_CONF. The
daemons run as whoever starts them. Credentials expire after 5 s: slurmctld lets a requeued job wait for that time.
"""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

DAEMONS = ("munged", "slurmctld", "slurmd")
SBIN = "/usr/sbin"

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
GresTypes=gpu
ReturnToService=2
JobRequeue=1
FirstJobId={first}
KillWait=5
MessageTimeout=30
LaunchParameters=disable_send_gids
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} RealMemory={memory}
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    absent = [name for name in ("sbatch", *DAEMONS) if shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") is None]
    return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge" if absent else None


def _free_ports() -> list[int]:
    sockets = [socket.socket() for _ in range(2)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _configure(folder: Path) -> Path:
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munged refuses a socket folder that others can write to
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    ctld, slurmd = _free_ports()
    memory = psutil.virtual_memory().total // 2**20 - 1024
    # ranks find each other at a port made of the job's id, so two clusters of a machine must not share ids
    first = 1000 * (1 + secrets.randbelow(8)) + secrets.randbelow(900)
    (folder / "slurm.conf").write_text(CONF.format(
        folder=folder, host=socket.gethostname().split(".")[0], user=getpass.getuser(), ctld_port=ctld,
        slurmd_port=slurmd, first=first, cpus=max(2, os.cpu_count() or 2), memory=memory,
    ))  # fmt: skip
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
    return folder / "slurm.conf"


class Cluster:
    """`env` reaches it; the methods call Slurm's own commands."""

    def __init__(self, conf: Path):
        self.folder = conf.parent
        self.env = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:{SBIN}"}

    def command(self, *arguments: str, **environment: str) -> str:
        """Output of a command; raises with its error output."""
        env = {**self.env, **environment}
        done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{arguments}: {done.stderr}{done.stdout}"
        return done.stdout.strip()

    def submit(self, *arguments: str, **environment: str) -> str:
        """Job id of `sbatch arguments`."""
        return self.command("sbatch", "--parsable", *arguments, **environment)

    def job(self, ident: str) -> dict[str, str]:
        """What `scontrol show job` says, of the first record."""
        words = self.command("scontrol", "show", "job", "-o", ident).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, ident: str, seconds: float = 900) -> dict[str, str]:
        """The job once it is over, requeued or not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            jobs = self.command("scontrol", "show", "job", "-o", ident).splitlines()
            if not any(state in job for job in jobs for state in ("=PENDING", "=RUNNING", "=COMPLETING", "=REQUEUED")):
                return self.job(ident)
            time.sleep(0.25)
        raise AssertionError(f"job {ident} did not end in {seconds} s: {self.job(ident)}")


@contextmanager
def one_node(folder: Path) -> Iterator[Cluster]:
    """Start the three daemons, wait for an idle node, and stop everything afterwards."""
    conf = _configure(folder)
    cluster = Cluster(conf)
    munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("key-file", "pid-file", "seed-file")]
    munge += [f"--socket={folder}/munge.sock", f"--log-file={folder}/munge.log", "--num-threads=2"]
    commands = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D", "-i"], ["slurmd", "-D"]]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with open(folder / "daemons.log", "wb") as log:
            for command in commands:
                processes.append(subprocess.Popen(command, env=cluster.env, stdout=log, stderr=log))
                time.sleep(0.5)  # the next one speaks to this one
        _await_idle(cluster, processes)
        yield cluster
    finally:
        subprocess.run(["scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}"], env=cluster.env)
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=cluster.env)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_idle(cluster: Cluster, processes: list[subprocess.Popen[bytes]]) -> None:
    for _ in range(120):
        dead = [name for name, process in zip(DAEMONS, processes) if process.poll() is not None]
        if dead:
            break
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=cluster.env, capture_output=True, text=True)
        if done.stdout.strip() == "idle":
            return
        time.sleep(0.25)
    logs = "\n".join(f"{file}:\n{file.read_text()[-1500:]}" for file in sorted(cluster.folder.glob("*.log")))
    raise RuntimeError(f"Slurm did not come up ({', '.join(dead) or 'no daemon'} died):\n{logs}")


if __name__ == "__main__":
    with one_node(Path(sys.argv[1]).absolute()) as up:
        print(f"export SLURM_CONF={up.env['SLURM_CONF']}", flush=True)
        try:
            time.sleep(10**6)
        except KeyboardInterrupt:
            print("stopping")
