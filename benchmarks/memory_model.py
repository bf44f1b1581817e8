"""The memory model of `qdeepseek plan` against measured peaks: three small random models, on the CPU, one process each.
`python -m benchmarks.memory_model` writes docs/results/memory_model.json; `--small` is for tests.

A process builds the model, puts INT4 quantisers in (learned scales), and takes steps of the training module with its
optimizer on random tokens, in fp32. `measured_bytes` is its high-water mark less what it held before the model was
built; `predicted_bytes` is the plan of the same model, recipe and batch for one process without DeepSpeed. The C
library's allocator is told to give freed tensors back (MALLOC_MMAP_THRESHOLD_), as a GPU's caching allocator reuses
them; what it keeps otherwise is not the model's.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cost import CONF, memory_now, memory_peak

OUT = Path(__file__).parent.parent / "docs" / "results" / "memory_model.json"
VARIANTS = ("plain", "checkpointed", "recomputed", "distilled")
_MLA = {"num_key_value_heads": 8, "num_attention_heads": 8, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "v_head_dim": 64, "kv_lora_rank": 256, "first_k_dense_replace": 1, "tie_word_embeddings": False,
        "max_position_embeddings": 1024}  # fmt: skip
MODELS = {
    "dense": {"model_type": "qwen2", "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048,
              "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
              "max_position_embeddings": 1024, "tie_word_embeddings": False},
    "moe_v2": {"model_type": "deepseek_v2", "vocab_size": 8192, "hidden_size": 640, "intermediate_size": 1792,
               "moe_intermediate_size": 320, "num_hidden_layers": 8, "n_routed_experts": 16, "n_shared_experts": 2,
               "num_experts_per_tok": 4, "q_lora_rank": None, "topk_method": "greedy", **_MLA},
    "moe_v3": {"model_type": "deepseek_v3", "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048,
               "moe_intermediate_size": 384, "num_hidden_layers": 8, "n_routed_experts": 24, "n_shared_experts": 1,
               "num_experts_per_tok": 4, "q_lora_rank": 256, "n_group": 1, "topk_group": 1, **_MLA},
}  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2,
         "vocab_size": 512, "n_routed_experts": 4, "num_experts_per_tok": 2}  # fmt: skip


def scratch(model: str, small: bool) -> dict[str, Any]:
    values = MODELS[model]
    return {**values, **{k: v for k, v in SMALL.items() if k in values}} if small else dict(values)


def int4() -> Any:
    """quant=w4a16_g32 with scales from the range of the weights, which is quicker to find and as large."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from qdeepseek.surgery import Recipe

    words = ["quant=w4a16_g32", "quant.schemes.main.method.kind=minmax", "run_dir=x"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        quant: Any = OmegaConf.to_container(compose("train", words).quant, resolve=True)
    return Recipe.from_config(quant)


def predict(model: str, variant: str, batch: int, length: int, small: bool) -> dict[str, Any]:
    """The plan's components of one process."""
    from qdeepseek.plan.architecture import architecture_of, meta_model
    from qdeepseek.plan.blocks import blocks_of
    from qdeepseek.plan.memory import Job, memory
    from qdeepseek.surgery import plan
    from qdeepseek.train.models import ModelConfig

    built, _ = meta_model(ModelConfig(scratch=scratch(model, small)))
    job = Job(
        batch=batch, length=length, precision="32-true", checkpointing=variant == "checkpointed",
        recompute=variant == "recomputed", teacher=variant == "distilled", fused_attention=model == "dense",
    )  # fmt: skip
    blocks, architecture = blocks_of(plan(built, int4())), architecture_of(built)
    return {"parameters": sum(b.parameters for b in blocks), **memory(blocks, architecture, job, "ddp").to_dict()}


def measure(model: str, variant: str, batch: int, length: int, steps: int, small: bool) -> int:
    """Peak of this process, which must be fresh: steps of the training module."""
    import transformers  # noqa: F401

    from qdeepseek.layers import WeightQuantizer
    from qdeepseek.surgery import prepare
    from qdeepseek.train.config import OptimConfig
    from qdeepseek.train.models import ModelConfig, load_model
    from qdeepseek.train.module import FineTune

    recipe, config = int4(), ModelConfig(scratch=scratch(model, small))
    torch.manual_seed(0)
    before = memory_now()
    student = load_model(replace(config, gradient_checkpointing=variant == "checkpointed"))
    prepare(student, recipe)
    teacher = load_model(config).requires_grad_(False) if variant == "distilled" else None
    for module in student.modules():
        if isinstance(module, WeightQuantizer):
            module.recompute = variant == "recomputed"
    weight = 1.0 if teacher is not None else 0.0
    module = FineTune(student, OptimConfig(lr=1e-4), steps, teacher, weight)
    optimizer = module.configure_optimizers()["optimizer"]
    for _ in range(steps):
        ids = torch.randint(0, student.config.vocab_size, (batch, length))
        ce, kl = module.losses({"input_ids": ids, "labels": ids}, distill=teacher is not None)
        ((1 - weight) * ce + weight * kl).backward()
        optimizer.step()
        optimizer.zero_grad()
    return memory_peak() - before


def in_child(model: str, variant: str, arguments: list[str]) -> int:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory_model", "--row", model, variant, *arguments]
    allocator = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 18)}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **allocator})
    if done.returncode:
        raise RuntimeError(f"{model} {variant} failed: {done.stderr[-2000:]}")
    return int(done.stdout.strip().splitlines()[-1])


def row_of(model: str, variant: str, measured: int, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the file: the measured peak, and the plan of it."""
    predicted = predict(model, variant, args.batch, args.length, args.small)
    count, moment, total = (predicted.pop(key) for key in ("parameters", "moment", "total"))
    return {
        "model": model, "variant": variant, "parameters": count, "measured_bytes": measured,
        "predicted_bytes": round(total), "ratio": total / measured, "moment": moment,
        "components": {k: round(v) for k, v in predicted.items() if v},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="models of a fraction of a million parameters")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--predict", action="store_true", help="predict anew beside the peaks that the file has")
    parser.add_argument("--row", nargs=2, metavar=("MODEL", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(measure(*args.row, args.batch, args.length, args.steps, args.small))
        return
    from qdeepseek.train.provenance import git_commit

    facts = {"batch": args.batch, "length": args.length, "steps": args.steps, "dtype": "float32", "recipe": "w4a16_g32"}
    if args.predict:
        content = json.loads(args.out.read_text())
        if any(content[k] != v for k, v in facts.items()):
            parser.error(f"--predict: {args.out} was measured with other {', '.join(facts)}")
        content["rows"] = [row_of(r["model"], r["variant"], r["measured_bytes"], args) for r in content["rows"]]
        args.out.write_text(json.dumps(content, indent=1) + "\n")
        return
    words = ["--batch", str(args.batch), "--length", str(args.length), "--steps", str(args.steps)]
    words += ["--small"] if args.small else []
    command = ("python -m benchmarks.memory_model " + " ".join(sys.argv[1:])).strip()
    content = {"command": command, "commit": git_commit(), **facts, "rows": []}
    for model in args.models:
        for variant in args.variants:
            row = row_of(model, variant, in_child(model, variant, words), args)
            content["rows"].append(row)
            print({k: row[k] for k in ("model", "variant", "measured_bytes", "predicted_bytes", "ratio")}, flush=True)
            args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
