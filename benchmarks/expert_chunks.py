"""What experts in chunks save and cost, and ZeRO's memory model against measured peaks: two processes on the CPU.
`python -m benchmarks.expert_chunks` writes docs/results/expert_chunks.json; `--small` is for tests.

Two ranks take steps of the training module with a random DeepSeek-V3, INT4 quantisers (learned scales) and gradient
checkpointing, in fp32; at stage 3 it is streamed into partitions, its experts whole or in chunks. `measured_bytes` is
the larger high-water mark of the two, from the second step on, of forward and backward and of the optimizer's step,
less what a process held before the model was there; `predicted_bytes` that of the plan. `cpu_seconds` are those of a
step of one process. A fit of a tiny model before it all pays for imports and the buffers of gloo.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.cost import memory_now, memory_peak
from benchmarks.memory_model import int4

OUT = Path(__file__).parent.parent / "docs" / "results" / "expert_chunks.json"
MODEL = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512,
    "num_hidden_layers": 4, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
# nothing stays gathered beside what is computed, buckets are small: what is left is what chunks are about
ZERO = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 2_000_000}  # fmt: skip
ROWS = ["zero2:1", "zero3:1", "zero3:4", "zero3:16"]
STEPS = 3
MOMENTS = ("backward", "step")
CLEAR = Path("/proc/self/clear_refs")  # "5" forgets the high-water mark


def predict(strategy: str, chunks: int, batch: int, length: int, small: bool = False) -> dict[str, int]:
    """Bytes of the plan for one of the two ranks: the worst of forward and backward, and the optimizer's step."""
    from qdeepseek.plan.architecture import architecture_of, meta_model
    from qdeepseek.plan.blocks import blocks_of
    from qdeepseek.plan.memory import Job, moments
    from qdeepseek.surgery import plan
    from qdeepseek.train.models import ModelConfig

    sizes = {**MODEL, **(SMALL if small else {})}
    built, _ = meta_model(ModelConfig(scratch={"model_type": "deepseek_v3", **sizes}))
    job = Job(gpus=2, batch=batch, length=length, precision="32-true", teacher=False, fused_attention=False,
              bucket=ZERO["reduce_bucket_size"], live=0)  # fmt: skip
    blocks = blocks_of(plan(built, int4()), chunks)
    *working, step = moments(blocks, architecture_of(built), job, strategy)  # type: ignore[arg-type]
    return {"backward": round(max(m.total for m in working)), "step": round(step.total)}


class Watch(L.Callback):
    """Losses, CPU seconds at the end of every step, and the high-water mark of every part of it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peaks = dict.fromkeys(MOMENTS, 0)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        CLEAR.write_text("5")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._mark("backward")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self._mark("step")
        self.losses.append(float(outputs["loss"]))
        self.seconds.append(time.process_time())

    def _mark(self, moment: str) -> None:
        if self.losses:  # moments of the optimizer are there from the first step's end on
            self.peaks[moment] = max(self.peaks[moment], memory_peak())
        CLEAR.write_text("5")


def rank(folder: Path, strategy: str, chunks: int, batch: int, length: int) -> dict[str, Any]:
    """Steps of this process, which must be fresh."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from qdeepseek.surgery import prepare
    from qdeepseek.train.models import ModelConfig
    from qdeepseek.train.partitioned import load_partitioned

    torch.set_num_threads(1)
    tiny = DeepseekV3ForCausalLM(DeepseekV3Config(**{**MODEL, **SMALL}))
    _fit(_trainer(strategy, folder, []), tiny, 1, length)  # imports, process group, buffers of gloo
    del tiny
    watch = Watch()
    trainer = _trainer(strategy, folder, [watch])
    before = memory_now()
    config = ModelConfig(path=str(folder), gradient_checkpointing=True, expert_chunks=chunks)
    if strategy == "zero3":
        student = load_partitioned(config, int4(), trainer.strategy.config)  # type: ignore[attr-defined]
    else:
        torch.manual_seed(0)  # built again, since weights that were read from a file stay mapped into this process
        student = DeepseekV3ForCausalLM(DeepseekV3Config.from_pretrained(folder)).eval()
        student.gradient_checkpointing_enable({"use_reentrant": False})
        prepare(student, int4())
    _fit(trainer, student, batch, length)
    seconds = (watch.seconds[-1] - watch.seconds[0]) / (STEPS - 1)
    peaks = {moment: peak - before for moment, peak in watch.peaks.items()}
    return {"bytes": peaks, "cpu_seconds": seconds, "losses": watch.losses}


def _trainer(strategy: str, folder: Path, callbacks: list[L.Callback]) -> L.Trainer:
    from qdeepseek.train.strategy import make
    from qdeepseek.train.zero import ZeroConfig

    zero = {k: v for k, v in ZERO.items() if strategy == "zero3" or not k.startswith("stage3")}
    return L.Trainer(
        max_steps=STEPS, max_epochs=-1, accelerator="cpu", devices=2, logger=False, callbacks=callbacks,
        strategy=make(ZeroConfig(strategy, int(strategy[-1]), zero_optimization=zero), "32-true"),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        use_distributed_sampler=False, default_root_dir=folder,
    )  # fmt: skip


def _fit(trainer: L.Trainer, student: Any, batch: int, length: int) -> None:
    from qdeepseek.train.config import OptimConfig
    from qdeepseek.train.module import FineTune

    generator = torch.Generator().manual_seed(trainer.global_rank)
    ids = torch.randint(0, MODEL["vocab_size"], (STEPS * batch, length), generator=generator)
    loader = torch.utils.data.DataLoader([{"input_ids": i, "labels": i} for i in ids], batch_size=batch)
    trainer.fit(FineTune(student, OptimConfig(lr=1e-4, warmup_steps=0), STEPS), loader)


def both_ranks(folder: Path, strategy: str, chunks: int, batch: int, length: int) -> list[dict[str, Any]]:
    """What `rank` found in two processes that torchrun starts."""
    words = ["--rank", str(folder), "--rows", f"{strategy}:{chunks}", "--batch", str(batch), "--length", str(length)]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-W", "ignore", "-m", *torchrun, "-m", "benchmarks.expert_chunks", *words]
    allocator = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 18)}
    environment = {**os.environ, **allocator, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{strategy}, {chunks} chunks: failed: {done.stderr[-3000:]}")
    return [json.loads((folder / f"rank{number}.json").read_text()) for number in range(2)]


def row_of(folder: Path, strategy: str, chunks: int, args: argparse.Namespace) -> dict[str, Any]:
    ranks = both_ranks(folder, strategy, chunks, args.batch, args.length)
    predicted = predict(strategy, chunks, args.batch, args.length, args.small)
    measured = {moment: max(r["bytes"][moment] for r in ranks) for moment in MOMENTS}
    return {
        "strategy": strategy, "chunks": chunks, "measured_bytes": measured, "predicted_bytes": predicted,
        "ratio": {moment: predicted[moment] / measured[moment] for moment in MOMENTS},
        "cpu_seconds": sum(r["cpu_seconds"] for r in ranks) / 2, "losses": [r["losses"] for r in ranks],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of a few million parameters")
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="STRATEGY:CHUNKS")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        strategy, chunks = args.rows[0].split(":")
        found = rank(args.rank, strategy, int(chunks), args.batch, args.length)
        (args.rank / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
        return
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from qdeepseek.train.provenance import git_commit

    command = ("python -m benchmarks.expert_chunks " + " ".join(sys.argv[1:])).strip()
    content = {"command": command, "commit": git_commit(), "batch": args.batch, "length": args.length,
               "dtype": "float32", "recipe": "w4a16_g32", "ranks": 2, "rows": []}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(0)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**MODEL, **(SMALL if args.small else {})}))
        content["parameters"] = sum(p.numel() for p in model.parameters())
        content["experts_of_a_layer"] = sum(p.numel() for p in model.model.layers[-1].mlp.experts.parameters())
        model.save_pretrained(place)
        del model
        for words in args.rows:
            strategy, chunks = words.split(":")
            row = row_of(Path(place), strategy, int(chunks), args)
            content["rows"].append(row)
            print({k: v for k, v in row.items() if k != "losses"}, flush=True)
            args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
