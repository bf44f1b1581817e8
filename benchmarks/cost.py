"""What INT4 in the loop costs: step time and peak memory over a plain fine-tune step.
`python -m benchmarks.cost` writes docs/results/cost.json.

Variants run in turn in one process, so that a slow moment of the machine falls on all of them; the ratio is
the median over rounds of (variant / plain) within a round. Peak memory is the high-water mark of a process of
its own, less what it held before the model was built. torchao fake-quantises `nn.Linear` only, so it is
compared on the dense model.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

OUT = Path(__file__).parent.parent / "docs" / "results" / "cost.json"
CONF = Path(__file__).parent.parent / "conf"
SEQUENCES, LENGTH = 4, 256
VARIANTS = {
    "plain": ("off", ""), "w4a16": ("w4a16_g32", ""), "w4a16 cached": ("w4a16_g32", "cache"),
    "w4a16 recomputed": ("w4a16_g32", "recompute"), "w4a8": ("w4a8", ""), "w4a8 cached": ("w4a8", "cache"),
    "torchao w4a16": ("torchao", ""),
}  # fmt: skip


def build(kind: str) -> nn.Module:
    """A dense Llama or a DeepSeek-V3 MoE of about 20 M parameters, from a fixed seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if kind == "dense":
        config = AutoConfig.for_model(
            "llama", vocab_size=1024, hidden_size=512, intermediate_size=1408, num_hidden_layers=6,
            num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=512, tie_word_embeddings=False,
        )  # fmt: skip
    else:
        config = AutoConfig.for_model(
            "deepseek_v3", vocab_size=1024, hidden_size=384, intermediate_size=1024, moe_intermediate_size=256,
            num_hidden_layers=5, first_k_dense_replace=1, num_attention_heads=6, num_key_value_heads=6,
            n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=1, n_group=1, topk_group=1,
            q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64,
            max_position_embeddings=512, tie_word_embeddings=False,
        )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make(kind: str, variant: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model with its quantisers and its optimizer."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from qdeepseek.layers import WeightQuantizer
    from qdeepseek.surgery import Recipe, prepare

    model = build(kind).train()
    scheme, memory = VARIANTS[variant]
    if scheme == "torchao":
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

        config = IntxFakeQuantizeConfig(torch.int4, group_size=32, is_symmetric=True)
        quantize_(model, QATConfig(weight_config=config, step="prepare"), lambda m, name: _linear(m, name))
    elif scheme != "off":
        with initialize_config_dir(str(CONF), version_base="1.3"):
            quant: Any = OmegaConf.to_container(compose("train", [f"quant={scheme}", "run_dir=x"]).quant, resolve=True)
        prepare(model, Recipe.from_config(quant))
        for module in model.modules():
            if isinstance(module, WeightQuantizer):
                module.cache, module.recompute = memory == "cache", memory == "recompute"
    return model, torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def _linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int) -> None:
    """One optimizer step as the training does it: under accumulation scales get their gradient at its end."""
    from qdeepseek.surgery.prepare import quantized_tensors

    tensors = list(quantized_tensors(model))
    for tensor in tensors:
        tensor.quantizer.defer = accumulate > 1
    for _ in range(accumulate):
        ids = torch.randint(0, 1024, (SEQUENCES, LENGTH))
        model(input_ids=ids, labels=ids).loss.backward()
    for tensor in tensors:
        tensor.quantizer.set_scale_grad(tensor.weight)
    optimizer.step()
    optimizer.zero_grad()


def times(kind: str, accumulate: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median ratio to plain, and its range, of every variant."""
    names = [v for v in VARIANTS if not v.startswith("torchao") or (kind == "dense" and has_torchao())]
    built = {name: make(kind, name) for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        seconds = {}
        for name, (model, optimizer) in built.items():
            start = time.perf_counter()
            step(model, optimizer, accumulate)
            seconds[name] = time.perf_counter() - start
        if round_:  # the first warms up
            for name in names:
                ratios[name].append(seconds[name] / seconds["plain"])
    return {
        n: {"median": statistics.median(r), "min": min(r), "max": max(r)} for n, r in ratios.items() if n != "plain"
    }


def has_torchao() -> bool:
    try:
        import torchao  # noqa: F401
    except ImportError:
        return False
    return True


def peak_bytes(kind: str, variant: str) -> int:
    """High-water mark of a process that takes three steps, less what it held before the model."""
    command = [sys.executable, "-m", "benchmarks.cost", "--peak-of", kind, variant]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.strip().splitlines()[-1])


def print_peak(kind: str, variant: str) -> None:
    import transformers  # noqa: F401

    import qdeepseek.surgery  # noqa: F401

    before = memory_now()
    model, optimizer = make(kind, variant)
    for _ in range(3):
        step(model, optimizer, 2)
    print(memory_peak() - before)


def memory_now() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory_peak() -> int:
    """Most resident bytes that this process ever had; not ru_maxrss, which a child inherits from its parent."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=["dense", "moe"], choices=["dense", "moe"])
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--peak-of", nargs=2, metavar=("KIND", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        print_peak(*args.peak_of)
        return
    from qdeepseek.train.provenance import git_commit

    command, commit = ("python -m benchmarks.cost " + " ".join(sys.argv[1:])).strip(), git_commit()
    rows: list[dict[str, Any]] = []
    for kind in args.models:
        weights = sum(p.numel() * 4 for p in build(kind).parameters())
        found = {a: times(kind, a, args.rounds if a == 1 else max(3, args.rounds // 2)) for a in args.accumulate}
        plain = peak_bytes(kind, "plain")
        for variant in found[args.accumulate[0]]:
            peak = peak_bytes(kind, variant)
            row = {"model": kind, "variant": variant, "weights_bytes": weights, "peak_bytes": peak,
                   "plain_peak_bytes": plain, "memory_ratio": peak / plain,
                   "time_ratio": {str(a): found[a][variant] for a in args.accumulate}}  # fmt: skip
            rows.append(row)
            print(
                kind,
                variant,
                {a: round(found[a][variant]["median"], 3) for a in found},
                round(peak / plain, 3),
                flush=True,
            )
        facts = {"tokens_per_micro_batch": SEQUENCES * LENGTH, "threads": torch.get_num_threads(), "dtype": "float32"}
        args.out.write_text(json.dumps({"command": command, "commit": commit, **facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
