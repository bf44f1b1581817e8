"""The methods of benchmarks/quality.py as models ready to be scored, all from the same FP_ft and branch point."""

from collections.abc import Iterator
from typing import Any

from torch import nn

Scored = tuple[str, nn.Module, float, float]  # method, model, share of parameters quantised, bits per quantised weight


def bits_per_weight(coverage: Any) -> float:
    """Stored bits of the quantised weights over their number, scales and zero points included."""
    quantized = [t for t in coverage.planned if t.scheme is not None]
    return sum(t.bits for t in quantized) / sum(t.numel for t in quantized)


def models(run: Any, scheme: str, method: str) -> Iterator[Scored]:
    """Yield the models of one method; torchao's QAT yields two, as it is and with the rest rounded to nearest."""
    from eval.compare import calibration_batches
    from qdeepseek.ptq.gptq import gptq
    from qdeepseek.surgery import plan, prepare
    from qdeepseek.train.qat import quantise_aware

    coverage = plan(run.load("fp_ft"), run.recipe)
    share, bits = coverage.quantized_share, bits_per_weight(coverage)
    if method == "qat":
        yield "qat", quantise_aware(run), share, bits
    elif method in ("rtn", "gptq"):
        model = run.load("fp_ft")
        prepare(model, run.recipe)
        if method == "gptq":
            gptq(model, calibration_batches(run.data, run.method.gptq_sequences, run.seed))
        yield method, model, share, bits
    else:
        from benchmarks import peers

        yield from peers.scored(run, scheme, method, share, bits)
