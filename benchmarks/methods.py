"""The methods of benchmarks/quality.py as models ready to be scored, all from the same FP_ft and branch point."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

AUTOROUND_SEQUENCES = 128
Scored = tuple[str, nn.Module, float, float]  # method, model, share of parameters quantised, bits per quantised weight


def bits_per_weight(coverage: Any) -> float:
    """Stored bits of the quantised weights over their number, scales and zero points included."""
    quantized = [t for t in coverage.planned if t.scheme is not None]
    return sum(t.bits for t in quantized) / sum(t.numel for t in quantized)


def models(run: Any, scheme: str, method: str) -> Iterator[Scored]:
    """Yield the models of one method; torchao's QAT yields two, as it is and with the rest rounded to nearest."""
    from qdeepseek.ptq.gptq import gptq
    from qdeepseek.surgery import plan, prepare
    from qdeepseek.surgery.rotate import rotate
    from qdeepseek.train.qat import quantise_aware

    coverage = plan(run.load("fp_ft"), run.recipe)
    share, bits = coverage.quantized_share, bits_per_weight(coverage)
    if method == "qat":
        yield "qat", quantise_aware(run), share, bits
    elif method in ("rtn", "gptq", "rtn_rotated", "gptq_rotated"):
        model = run.load("fp_ft")
        if method.endswith("_rotated"):
            rotate(model, seed=run.seed)
        prepare(model, run.recipe)
        if method.startswith("gptq"):
            gptq(model, run.data.calibration(run.method.gptq_sequences))
        yield method, model, share, bits
    elif method == "autoround":
        yield _autoround(run, coverage, bits)
    else:
        yield _torchao(run, coverage, method, bits)


def _autoround(run: Any, coverage: Any, bits: float) -> Scored:
    from benchmarks import peers

    batches = run.data.calibration(AUTOROUND_SEQUENCES)
    windows = torch.cat([batch["input_ids"] for batch in batches])
    found = peers.autoround_weights(run.load("fp_ft"), windows, coverage.tensors, run.seed)
    return "autoround", found.model, found.share, bits


def _torchao(run: Any, coverage: Any, method: str, bits: float) -> Scored:
    """torchao's fake-quant in the same training; `torchao_qat_unfused` hands it the experts as Linear layers."""
    from benchmarks import peers
    from qdeepseek.train.qat import quantise_aware

    covered: list[float] = []
    tensors = dict(coverage.tensors)

    def prepare_student(model: nn.Module) -> None:
        if method == "torchao_qat_unfused":
            tensors.update(peers.unfuse_experts(model, tensors))
        covered.append(peers.torchao_prepare(model, tensors)[1])

    student = quantise_aware(run, prepare_student)
    return method, peers.torchao_convert(student, tensors), covered[0], bits
