"""The columns of the main job, one model in memory beside the teacher: base, FP_ft, RTN, GPTQ, QAT as exported.

The teacher's hidden states are kept from column to column while they are small (REMEMBERED_BYTES). The QAT column is
the folder read back, never the training weights. A run with a quantised KV cache (`method/kv_cache`) gives RTN and
GPTQ the same cache.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from eval.heldout import document_batches
from eval.layer_error import hidden_error, weight_error
from eval.retention import Retention
from eval.size import folder_size
from eval.token_metrics import TokenMetrics, token_metrics
from qdeepseek.export.loader import load_prepared
from qdeepseek.ptq.gptq import gptq
from qdeepseek.ptq.rtn import round_to_nearest
from qdeepseek.surgery import prepare
from qdeepseek.surgery.rotate import rotate
from qdeepseek.train.data import BuiltData, spread
from qdeepseek.train.models import DTYPES
from qdeepseek.train.qat import Run

Batch = Mapping[str, Tensor]
REMEMBERED_BYTES = 2**30


def report_batches(data: BuiltData) -> list[Batch]:
    """The part of the final numbers: windows that know their document for running text, packed sequences for chats."""
    size, limit = data.loader.batch_size, data.loader.report_sequences
    select = data.loader.evaluate == "select"
    tokens = data.select_tokens if select else data.report_tokens
    if tokens is not None:
        return list(document_batches(tokens, length=data.length, batch_size=size, boundary=data.boundary, limit=limit))
    return list(DataLoader(spread(data.select if select else data.report, limit), size, collate_fn=data.collate))


def load_export(folder: Path, dtype: str, attention: str = "sdpa") -> PreTrainedModel:
    """The exported model with the forward that was trained, activation quantisers included."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation=attention)
    load_prepared(model, folder)
    return model.eval()


@dataclass
class Comparison:
    """Metrics by column, and error maps by column, against FP_ft."""

    metrics: dict[str, TokenMetrics] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    hidden: dict[str, Any] = field(default_factory=dict)


def columns(run: Run, export: Path) -> dict[str, Callable[[], PreTrainedModel]]:
    """Column name -> how its model is made, in the order of the table."""

    def quantise(model: PreTrainedModel) -> None:
        prepare(model, run.recipe)
        if "kv_cache" in run.methods:
            run.methods["kv_cache"].attach(run, model)

    def rtn() -> PreTrainedModel:
        model = run.load("fp_ft")
        quantise(model)
        round_to_nearest(model)
        return model

    def gptq_of_fp_ft() -> PreTrainedModel:
        model = run.load("fp_ft").to(run.device)  # type: ignore[arg-type]
        quantise(model)
        gptq(model, run.data.calibration(run.method.gptq_sequences, run.device))
        return model

    return {
        "base": lambda: run.load("base"),
        "rtn": rtn,
        "gptq": gptq_of_fp_ft,
        "qat": lambda: load_export(export, run.model.dtype, run.model.attention),
    }


def rotated_teacher(run: Run) -> PreTrainedModel:
    """FP_ft in the rotated basis of the student: what its weights and hidden states are compared with."""
    model = run.load("fp_ft")
    rotate(model, seed=run.seed)
    return model.to(run.device)  # type: ignore[arg-type]


def compare(run: Run, export: Path) -> Comparison:
    """Evaluate every column on the report part with FP_ft as the teacher."""
    batches = report_batches(run.data)
    teacher = run.load("fp_ft").to(run.device)  # type: ignore[arg-type]
    states = 4 * sum(batch["labels"].numel() for batch in batches) * teacher.config.hidden_size
    remember: list[Tensor | None] | None = [] if states <= REMEMBERED_BYTES else None
    with run.timed("evaluate"):
        result = Comparison(dict(token_metrics({"fp_ft": teacher}, batches, teacher=teacher, remember=remember)))
    for name, make in columns(run, export).items():
        with run.timed(name if name in ("rtn", "gptq") else "evaluate"):
            model = make().to(run.device)  # type: ignore[arg-type]
        with run.timed("evaluate"):
            result.metrics.update(token_metrics({name: model}, batches, teacher=teacher, remember=remember))
            if name != "base":
                reference = teacher if name != "qat" or not run.rotates else rotated_teacher(run)
                result.weights[name] = weight_error(model, reference).to_dict()
                found = hidden_error({name: model}, reference, list(islice(batches, 4)))
                result.hidden[name] = found[name].to_dict()
    return result


def retention(run: Run, comparison: Comparison, export: Path) -> Retention:
    """Derived numbers of the run's scheme: intervals, gap recovered, sizes."""
    return Retention(
        run.recipe.name, comparison.metrics, size=folder_size(export), full_size=folder_size(run.unquantised / "fp_ft"),
        seed=run.seed,
    )  # fmt: skip
