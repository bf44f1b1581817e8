"""Peak memory of QAT with adapters against full QAT, on a random DeepSeek-V3 of about 0.3 billion parameters.
`python -m benchmarks.lora` writes docs/results/lora.json; `--small` is for tests.

Each variant is a process of its own that builds the model, puts INT4 quantisers in, and takes steps of AdamW on random
tokens. `peak_bytes` is its high-water mark less what it held before the model was built; `trainable_parameters` and
`optimizer_bytes` (AdamW's two moments) are counted after the last step; `step_seconds` is the median, without the
first. checkpointed is gradient checkpointing, recomputed is method.recompute. No teacher: it would add the same to all.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.cost import memory_now, memory_peak

OUT = Path(__file__).parent.parent / "docs" / "results" / "lora.json"
VARIANTS = ("full", "lora", "full recomputed", "lora recomputed", "full checkpointed", "lora checkpointed")
SIZES = {
    "mid": {"hidden_size": 768, "intermediate_size": 2048, "moe_intermediate_size": 384, "num_hidden_layers": 10,
            "n_routed_experts": 32, "num_experts_per_tok": 4, "vocab_size": 8192},
    "small": {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3,
              "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256},
}  # fmt: skip


def build(size: str) -> nn.Module:
    """The random model, from a fixed seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v3", num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32,
        v_head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False, **SIZES[size],
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def measure(variant: str, size: str, rank: int, steps: int, sequences: int, length: int) -> dict[str, Any]:
    """The row of one variant, measured in this process, which must be fresh."""
    import transformers  # noqa: F401

    from qdeepseek.layers import WeightQuantizer
    from qdeepseek.surgery import prepare
    from qdeepseek.train import adapters

    recipe = int4()
    before = memory_now()
    model = build(size).train()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    prepare(model, recipe)
    method, _, memory = variant.partition(" ")
    for module in model.modules():
        if isinstance(module, WeightQuantizer):
            module.recompute = memory == "recomputed"
    if method == "lora":
        for wrapper in adapters.inject(model, None, rank, 2 * rank):
            wrapper.recompute = memory == "recomputed"
    if memory == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4, fused=True)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        ids = torch.randint(0, SIZES[size]["vocab_size"], (sequences, length))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    state = (t for values in optimizer.state.values() for t in values.values())
    return {
        "variant": variant,
        "weights_bytes": weights,
        "trainable_parameters": sum(p.numel() for p in trained),
        "optimizer_bytes": sum(t.numel() * t.element_size() for t in state if torch.is_tensor(t) and t.numel() > 1),
        "peak_bytes": memory_peak() - before,
        "step_seconds": statistics.median(seconds[1:]),
    }


def int4() -> Any:
    """The recipe of quant=w4a16_g32."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from benchmarks.cost import CONF
    from qdeepseek.surgery import Recipe

    with initialize_config_dir(str(CONF), version_base="1.3"):
        quant: Any = OmegaConf.to_container(compose("train", ["quant=w4a16_g32", "run_dir=x"]).quant, resolve=True)
    return Recipe.from_config(quant)


def in_child(variant: str, arguments: list[str]) -> dict[str, Any]:
    """The row of one variant from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.lora", "--row", variant, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{variant} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of half a million parameters")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--row", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = "small" if args.small else "mid"
    shape = {"rank": args.rank, "steps": args.steps, "sequences": args.sequences, "length": args.length}
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the first step is not timed, give at least 2")
    if args.row:
        print(json.dumps(measure(args.row, size, **shape)))
        return
    from qdeepseek.train.provenance import git_commit

    command, commit = ("python -m benchmarks.lora " + " ".join(sys.argv[1:])).strip(), git_commit()
    arguments = [word for key, value in shape.items() for word in (f"--{key}", str(value))]
    rows: list[dict[str, Any]] = []
    facts = {"model": size, "threads": torch.get_num_threads(), "dtype": "float32", **shape}
    for variant in args.variants:
        row = in_child(variant, [*arguments, *(["--small"] if args.small else [])])
        full = next((r for r in rows if r["variant"] == variant.replace("lora", "full")), row)
        rows.append(row | {"peak_over_full": row["peak_bytes"] / full["peak_bytes"]})
        print(rows[-1], flush=True)
        args.out.write_text(json.dumps({"command": command, "commit": commit, **facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
