"""QDeepSeek's program: load, cover, fine-tune with INT4 in the loop, export, reload, evaluate, report.

python train.py                                   # the embedded default, a few minutes on a CPU
python train.py model=deepseek_v2_lite data=sft data.path=chats.jsonl quant=w4a16_g32
python train.py … run_dir=outputs/…               # the same words and its folder: continue a killed run
"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig

from eval import compare, report, terminal
from eval.retention import run_metrics, write_metrics
from qdeepseek.surgery import Coverage, plan
from qdeepseek.train import qat, slurm
from qdeepseek.train.artifacts import open_folder, write_coverage
from qdeepseek.train.config import USER_ERRORS
from qdeepseek.train.console import quiet
from qdeepseek.train.export_saved import export_run
from qdeepseek.train.job import job_config
from qdeepseek.train.loggers import wandb_closed
from qdeepseek.train.pretrain import pretrain
from qdeepseek.train.run import ranks_of
from qdeepseek.train.stop import stoppable
from qdeepseek.train.wandb_record import log_end, log_start
from qdeepseek.train.zero import is_partitioned


def main_job(run: qat.Run) -> None:
    """Coverage → data → FP_ft → QAT → export → verify → reload → evaluate → report."""
    coverage = qat.check(run)
    rank_zero_only(print)(coverage.table(), flush=True)
    open_folder(run.folder, run.config, coverage, ranks_of(run.trainer))
    log_start(run.wandb, coverage)
    run.data  # noqa: B018  every row is read and checked before anything is trained
    fp_ft = qat.fine_tune(run)
    if coverage.quantized_share == 0:
        rank_zero_only(print)(f"recipe {run.recipe.name} quantises nothing: unquantised fine-tune only, in {fp_ft}")
        return
    student = qat.quantise_aware(run)
    if not is_partitioned(student.parameters()):
        coverage = plan(student, run.recipe)  # a method may leave another recipe than it began with
    finish(run, student, coverage)


@rank_zero_only
def finish(run: qat.Run, student: Any, coverage: Coverage) -> None:
    run.stop.alone = True
    write_coverage(run.folder, coverage)
    proof = export_run(run, student)
    if not proof.ok:
        sys.exit(f"error: {proof}")
    print(proof)
    folder = proof.folder
    if not run.config["evaluate"]:
        log_end(run.wandb, run.folder, coverage)
        print(f"\nexport: {folder}\nnot evaluated (evaluate=false): serve it, or python -m eval.perplexity {folder}")
        return
    comparison = compare.compare(run, folder)
    retention = compare.retention(run, comparison, folder)
    layers = {run.recipe.name: {"weights": comparison.weights, "hidden": comparison.hidden}}
    metrics = run_metrics(
        [retention], coverage=coverage.to_dict(), seconds=run.seconds, cpu_seconds=run.cpu_seconds, layers=layers,
        facts=qat.facts(run),
    )  # fmt: skip
    write_metrics(run.folder / "metrics.json", metrics)
    page = report.write_report(run.folder)
    run.stop.stage_ended("report")
    log_end(run.wandb, run.folder, coverage, metrics)
    print(f"\n{terminal.summary(metrics, page)}\nexport: {folder}")


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    config = job_config(cfg)
    quiet()
    try:
        slurm.adopt_ranks()
        with stoppable(config) as stop, wandb_closed():
            if config["job"] == "pretrain":
                print(f"model: {pretrain(config, Path(config['run_dir']), stop)}")
            else:
                main_job(qat.Run.from_config(config, stop))
    except USER_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") or "SUBMITIT_EXECUTOR" in os.environ:
            raise  # submitit hands an exception to the sweep that waits for it, and an exit not
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
