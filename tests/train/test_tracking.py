"""Under DDP and ZeRO-1/2/3, two processes: the same statistics, and those of a plain loop over all micro-batches."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from qdeepseek.train.datamodule import TokenDataModule
from tests.train.test_callbacks import Rows, collate
from tests.train.test_layer_statistics import naive_norms
from tests.train.zero_job import student_of

ROOT = Path(__file__).parents[2]
PLACES = ("ddp", "zero1", "zero2", "zero3")
STATISTICS = ("gradient_norm/", "codes_at_limits/", "rounding_error/", "scale_change")


def run_job(model, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("tracking_job.py")), str(model), str(folder)]
    with ExitStack() as files:
        logs = [files.enter_context((folder / f"rank{rank}.log").open("w")) for rank in range(2)]
        ranks = [
            subprocess.Popen([*command, ",".join(PLACES)], stdout=log, stderr=subprocess.STDOUT,
                             env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, log in enumerate(logs)
        ]  # fmt: skip
        try:
            codes = [process.wait(timeout=400) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert codes == [0, 0], "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(2))
    return json.loads((folder / "found.json").read_text())


def named(rows, *starts):
    """Step -> metrics with these beginnings."""
    kept = {}
    for step, metrics in rows:
        found = {k: v for k, v in metrics.items() if k.startswith(starts)}
        if found:
            kept.setdefault(step, {}).update(found)
    return kept


@pytest.mark.slow
def test_every_strategy_tells_the_same(tiny_folder, tmp_path):
    found = run_job(tiny_folder, tmp_path)
    order = TokenDataModule(Rows(), Rows(), 2, collate, seed=0)  # batch 2 m + r of one process is batch m of rank r
    layers, whole = naive_norms(student_of(str(tiny_folder)), [order.batch(i) for i in range(4)])
    plain = {f"gradient_norm/qat/{layer}": norm for layer, norm in layers.items()}
    reference = named(found["ddp"], *STATISTICS)
    assert list(reference) == [0, 1, 2] and len(reference[0]) == 4 + 4 * 3
    for where in PLACES:
        statistics = named(found[where], *STATISTICS)
        for name, norm in plain.items():
            assert statistics[0][name] == pytest.approx(norm, rel=1e-4), (where, name)
        for step, values in reference.items():
            assert statistics[step] == pytest.approx(values, rel=1e-2, abs=1e-5), (where, step)
        norms = named(found[where], "qat/gradient_norm")
        assert norms[0]["qat/gradient_norm"] == pytest.approx(whole, rel=2e-3), where
        throughput = named(found[where], "throughput/")
        assert [v["throughput/qat/tokens"] for v in throughput.values()] == [n * 2 * 2 * 2 * 16 for n in (1, 2, 3)]
        flops = [v["throughput/qat/model_tflops"] / v["throughput/qat/tokens_per_second"] for v in throughput.values()]
        one = named(found["ddp"], "throughput/")[0]
        expected = one["throughput/qat/model_tflops"] / one["throughput/qat/tokens_per_second"]
        assert flops == pytest.approx([expected] * 3), "partitioned parameters count whole"
