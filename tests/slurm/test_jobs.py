"""Jobs on a real Slurm of one node: a sweep, a preempted job, an array of evaluations, failures, refused requeues."""

import csv
import json
import re
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qdeepseek.train import slurm
from tests.slurm.conftest import NODE, ROOT, STEPS, STRATEGIES, WANDB
from tests.train.wandb_file import attempts

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def recorded_runs(folder: Path) -> list[tuple[str, str]]:
    """(id, group) of every W&B file of a run's folder, in the order in which they were begun."""
    return [(attempt.run["run_id"], attempt.run["run_group"]) for attempt in attempts(folder)]


def weights(folder: Path) -> dict[str, bytes]:
    """Every weight file that a run wrote: unquantised, branch point and export."""
    files = [f for part in ("fp_ft", "branch", "export") for f in sorted((folder / part).rglob("*.safetensors"))]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of the unquantised stage in the order logged, over all attempts."""
    files = sorted((folder / "logs" / "fp_ft").glob("version_*/metrics.csv"))
    rows = [row for file in files for row in csv.DictReader(file.open())]
    return [(int(row["step"]), float(row["fp_ft/loss"])) for row in rows if row["fp_ft/loss"]]


def text(file: Path) -> str:
    return file.read_text(errors="replace").replace("\r", "\n")


def test_a_sweep_leaves_one_folder_and_one_wandb_run_a_job(sweep):
    logs = "\n".join(text(file)[-2000:] for file in sorted(sweep.folder.glob(".submitit/**/*.err")))
    assert sweep.done.returncode == 0, f"{sweep.done.stderr[-3000:]}\n{logs}"
    assert sorted(path.name for path in sweep.folder.iterdir() if path.is_dir()) == [".submitit", "0", "1"]
    for number, strategy in enumerate(STRATEGIES):
        folder = sweep.folder / str(number)
        config = OmegaConf.load(folder / "config.yaml")
        assert config.strategy.name == strategy and Path(config.run_dir) == folder
        assert len(list((folder / "logs").glob("qat/version_*"))) == 1 and len(weights(folder)) == 3
        facts = json.loads((folder / "metrics.json").read_text())["facts"]
        assert facts["tokens"]["fp_ft"] == STEPS * 2 * 2 * 128  # steps × sequences × ranks × length
        ((ident, group),) = recorded_runs(folder)
        assert ident == (folder / "wandb_id.txt").read_text().strip() and group == "/".join(sweep.folder.parts[-2:])


@pytest.mark.parametrize(("number", "signal"), [(0, "SIGUSR1"), (1, "SIGTERM")], ids=STRATEGIES)
def test_a_preempted_job_queues_itself_again_and_ends_with_the_same_weights(
    cluster, sweep, options, tmp_path, number, signal
):
    folder, log = tmp_path / "run", tmp_path / "job.out"
    options = [*options, *WANDB, f"strategy={STRATEGIES[number]}", f"run_dir={folder}"]
    job = cluster.submit(*NODE, f"--output={log}", f"--chdir={ROOT}", "slurm/train.sbatch", *options)
    end = time.monotonic() + 900
    while not (log.exists() and re.search(rf"fp_ft.* [1-9]\d*/{STEPS} ", text(log))):
        assert time.monotonic() < end and not (log.exists() and "srun: error" in text(log)), text(log)
        time.sleep(0.05)  # steps are fast: a slower look may find the stage over
    cluster.command("scancel", f"--signal={signal}", job)
    done = cluster.wait(job)
    said = re.search(
        rf"stopped by {signal} after step (\d+) of {STEPS} of fp_ft, all of it saved in {folder}; (.*)", text(log)
    )
    assert said and 0 < int(said[1]) < STEPS and said[2] == f"job {job} queues itself again and continues there"
    assert (done["JobState"], done["ExitCode"], done["Restarts"]) == ("COMPLETED", "0:0", "1"), text(log)[-3000:]
    assert weights(folder) == weights(sweep.folder / str(number))
    assert losses(folder) == losses(sweep.folder / str(number)) and len(losses(folder)) == STEPS
    first, second = recorded_runs(folder)
    assert first == second and first[0] == (folder / "wandb_id.txt").read_text().strip()


def test_an_array_evaluates_one_folder_an_element(cluster, sweep, tmp_path):
    run = sweep.folder / "0"
    folders = {"qat": run / "export" / "compressed_tensors", "fp_ft": run / "fp_ft"}
    tasks = [f"perplexity {folder} --limit 4 --json {tmp_path / name}.json" for name, folder in folders.items()]
    log, where = f"--output={tmp_path}/%a.out", f"--chdir={ROOT}"
    job = cluster.submit("--array=0-2", "--gpus=0", "--cpus-per-task=1", log, where, "slurm/eval.sbatch", *tasks)
    cluster.wait(job)
    for name, folder in folders.items():
        (entry,) = json.loads((tmp_path / f"{name}.json").read_text())
        assert entry["folder"] == str(folder) and 1 < entry["perplexity"] < 1000
    assert cluster.job(f"{job}_2")["JobState"] == "FAILED"
    assert "no task of this number among the arguments" in text(tmp_path / "2.out")


def test_export_from_the_checkpoint_is_what_the_run_exported(cluster, sweep, tmp_path):
    run, log = sweep.folder / str(STRATEGIES.index("zero2")), tmp_path / "job.out"
    small = ["--cpus-per-task=1", "--mem=1G", f"--output={log}", f"--chdir={ROOT}"]
    job = cluster.submit(
        *small, "slurm/export.sbatch", str(run), "--output", str(tmp_path / "export" / "compressed_tensors")
    )
    assert cluster.wait(job)["ExitCode"] == "0:0", text(log)
    assert weights(tmp_path) == {name: bytes_ for name, bytes_ in weights(run).items() if "export" in name}


def test_a_failing_job_returns_its_exit_code_and_says_why(cluster, options, tmp_path):
    log = tmp_path / "job.out"
    by_rank = ["seed='${oc.env:SLURM_PROCID}'", f"run_dir={tmp_path / 'run'}"]
    job = cluster.submit(*NODE, f"--output={log}", f"--chdir={ROOT}", "slurm/train.sbatch", *options, *by_rank)
    done = cluster.wait(job)
    assert (done["JobState"], done["ExitCode"]) == ("FAILED", "1:0"), text(log)[-3000:]
    assert "error: ranks 0 and 1 have different configurations: seed 0 and 1; give as a value" in text(log)
    assert "Traceback" not in text(log) and not (tmp_path / "run" / "checkpoints").exists()


def running(cluster, *options: str) -> str:
    """A job that lives on for a while when it is cancelled, as one that saves its checkpoint."""
    job = cluster.submit(*options, "--output=/dev/null", "--wrap", "trap '' TERM; for i in $(seq 30); do sleep 2; done")
    while cluster.job(job)["JobState"] != "RUNNING":
        time.sleep(0.1)
    return job


def test_a_refused_requeue_says_why_and_a_cancelled_job_stays_cancelled(cluster, monkeypatch):
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])
    refused, cancelled = running(cluster, "--no-requeue"), running(cluster, "--requeue")
    monkeypatch.setenv("SLURM_JOB_ID", refused)
    with pytest.raises(slurm.RequeueError, match=f"requeue {refused}: .*may be queued again if it was submitted"):
        slurm.requeue()
    monkeypatch.setenv("SLURM_JOB_ID", cancelled)
    cluster.command("scancel", refused, cancelled)
    with pytest.raises(slurm.RequeueError, match=f"Slurm ends job {cancelled} already .state COMPLETING: cancelled"):
        slurm.requeue()
    assert cluster.wait(cancelled)["JobState"] == "CANCELLED"
