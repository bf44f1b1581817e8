"""A finished run's folder with invented numbers, for tests of what is drawn from it."""

import csv
import json
import math
from pathlib import Path

import torch

from eval.error_map import ErrorMap
from eval.retention import Retention, run_metrics, write_metrics
from eval.size import Size
from eval.token_metrics import TokenMetrics

PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
         "experts.gate_up_proj", "experts.down_proj", "shared_experts.gate_proj", "shared_experts.up_proj",
         "shared_experts.down_proj")  # fmt: skip


def invented_column(loss: float, kl: float, agreement: float, units: int = 31) -> TokenMetrics:
    tokens = torch.arange(1500, 1500 + units).double()
    hard = torch.randn(units, generator=torch.Generator().manual_seed(0)).double() * 0.25
    own = torch.randn(units, generator=torch.Generator().manual_seed(int(loss * 1e6))).double() * 0.003
    return TokenMetrics("document", torch.arange(units), tokens, (loss + hard + own) * tokens,
                        (0.68 - 0.1 * hard) * tokens, kl * (1 + 40 * own) * tokens,
                        (agreement + own).clamp(0, 1) * tokens)  # fmt: skip


def invented_maps(layers: int, columns: dict[str, float]) -> dict[str, dict]:
    generator = torch.Generator().manual_seed(1)

    def noise() -> float:
        return 1 + 0.15 * float(torch.randn((), generator=generator))

    weights, hidden = {}, {}
    for name, level in columns.items():
        cells = {}
        for layer in range(layers):
            for part in PARTS:
                dense = part in ("gate_proj", "up_proj", "down_proj")
                if part.startswith(("q_", "kv_", "o_")) or dense == (layer == 0):
                    cells[layer, part] = 0.085 * noise() * (1 + 0.4 * (1 - level))
        weights[name] = ErrorMap.from_cells(cells).to_dict()
        hidden[name] = ErrorMap.from_cells({
            (layer, part): level * 0.05 * size * (layer + 1) ** 0.5 * noise()
            for layer in range(layers) for part, size in (("attention", 1.4), ("MLP", 1.2), ("residual", 0.8))
        }).to_dict()  # fmt: skip
    return {"hidden": hidden, "weights": weights}


def write_curve(run: Path, stage: str, start: float, end: float, steps: int) -> None:
    file = run / "logs" / stage / "version_0" / "metrics.csv"
    file.parent.mkdir(parents=True)
    generator = torch.Generator().manual_seed(len(stage))
    fields = ["epoch", f"{stage}/loss", f"{stage}/select_loss", "lr-AdamW", "step"]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fields)
        writer.writeheader()
        for step in range(4, steps, 5):
            mean = end + (start - end) * math.exp(-3 * step / steps)
            writer.writerow({"step": step, f"{stage}/loss": mean + 0.02 * float(torch.randn((), generator=generator))})
            if step % 50 == 49:
                writer.writerow({"step": step, f"{stage}/select_loss": mean + 0.01})


def invented_run(run: Path, layers: int = 3, schemes: tuple[str, ...] = ("w4a16_g32",), gap: float = 0.0154) -> Path:
    """Write metrics.json, config.yaml and logs of a run that never was."""
    run.mkdir(parents=True, exist_ok=True)
    columns = {
        "base": invented_column(1.157, 0.0212, 0.928), "fp_ft": invented_column(1.1501, 0.0, 1.0),
        "rtn": invented_column(1.1501 + gap, 0.0164, 0.943),
        "gptq": invented_column(1.1501 + gap * 0.45, 0.0079, 0.957),
        "qat": invented_column(1.1501 + gap * 0.19, 0.0036, 0.971),
    }  # fmt: skip
    size, full = Size(1_010_000, 4.5 + 16 / 4096, 5.98, 0.92), Size(2_760_000, None, 16.4, 0.0)
    rows = [("routed_experts", "DeepseekV3NaiveMoe", "W4A16 g32", 4, 786432), ("mlp", "Linear", "W4A16 g32", 3, 98304),
            ("attention", "Linear", "W4A16 g32", 15, 294912), ("shared_experts", "Linear", "W4A16 g32", 6, 98304),
            ("embedding", "Embedding", "kept", 1, 36864), ("head", "Linear", "kept", 1, 36864),
            ("router", "DeepseekV3TopkRouter", "kept", 2, 2048),
            ("norm", "DeepseekV3RMSNorm", "kept", 13, 1664)]  # fmt: skip
    total = sum(r[4] for r in rows)
    keys = ("part", "module_class", "scheme", "tensors", "parameters")
    coverage = {
        "recipe": schemes[0], "parameters": total, "quantized_share": 1277952 / total, "expert_share": 1.0,
        "bits_per_weight": 5.1, "rows": [dict(zip(keys, r)) | {"share": r[4] / total} for r in rows],
    }  # fmt: skip
    maps = invented_maps(layers, {"rtn": 1.0, "gptq": 0.65, "qat": 0.4})
    metrics = run_metrics(
        [Retention(s, columns, size, full) for s in schemes],
        coverage=coverage, layers=dict.fromkeys(schemes, maps),
        seconds={"data": 6.2, "fp_ft": 71.5, "qat": 88.4, "gptq": 21.7, "export": 1.1, "evaluate": 34.9},
        facts={
            "model": "tiny DeepSeek-V3, 1.34 M parameters", "date": "2026-01-31", "command": "python train.py",
            "commit": "0123abc", "seed": 0, "tokens": {"fp_ft": 614400, "qat": 614400},
            "steps": {"fp_ft": 300, "qat": 150, "qat_starts_from": "branch"},
            "data": {"name": "standard library", "python": "3.13.1", "sha256": "9f86d081884c7d65" * 4,
                     "tokens": {"train": 16_400_000, "select": 810_000, "report": 930_000}},
            "versions": {"torch": "2.13.0", "transformers": "5.24.0", "compressed_tensors": "0.20.1"},
            "device": "CPU, 2 threads",
        },
    )  # fmt: skip
    write_metrics(run / "metrics.json", metrics)
    (run / "config.yaml").write_text("quant:\n  name: w4a16_g32\nseed: 0\nnote: <b>not markup</b>\n")
    write_curve(run, "fp_ft", 1.185, 1.150, 300)
    write_curve(run, "qat", 1.176, 1.154, 150)
    return run


def read(run: Path) -> dict:
    return json.loads((run / "metrics.json").read_text())
