"""Routing methods from a collapsed router: `python -m benchmarks.routing` writes docs/results/routing.json.

The shipped model's routers are spoilt so that two experts of each layer take nearly everything: with h̄ the mean
hidden state at a router, W_e ← W_e ± s·h̄/‖h̄‖² moves the logit of expert e by ±s for an average token, up for the
favourites and down for the rest. For every seed (favourites and order of the data) an unquantised fine-tune settles
this base; QAT then starts from its branch point once with each variant, on cross-entropy alone, since a collapsed
teacher would hold the student where it is. Losses and loads are those of the select part.

Rows are kept in the work folder and reused when the command is run again with the same settings.
"""

import argparse
import json
import math
import random
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality import ROOT, make_run
from eval.heldout import document_batches
from eval.token_metrics import inference, token_metrics
from qdeepseek.routing import statistics
from qdeepseek.routing.routers import find_routers, log_probabilities
from qdeepseek.routing.tap import RouterTap
from qdeepseek.train.provenance import git_commit
from qdeepseek.train.qat import Run, fine_tune, quantise_aware
from qdeepseek.train.save import save_model

OUT = ROOT / "docs" / "results" / "routing.json"
ENTROPY = "method/routing=entropy method.routing.entropy."
VARIANTS = {
    "none": "",
    "entropy": f"{ENTROPY}weight=0.02",
    "entropy_weak": f"{ENTROPY}weight=0.002",
    "entropy_strong": f"{ENTROPY}weight=0.1",
    "entropy_decay": f"{ENTROPY}weight=0.1 method.routing.entropy.decay=linear method.routing.entropy.decay_until=0.7",
    "entropy_floor": f"{ENTROPY}weight=0.1 method.routing.entropy.target=0.9",
    "entropy_decay_floor": f"{ENTROPY}weight=0.1 method.routing.entropy.target=0.9 "
    "method.routing.entropy.decay=linear method.routing.entropy.decay_until=0.7",
    "entropy_unlimited": f"{ENTROPY}weight=0.02 method.routing.gradient=null",
    "bias": "method/routing=bias",
    "bias_fast": "method/routing=bias method.routing.bias_speed=0.01",
    "entropy_and_bias": "method/routing=entropy method.routing.bias_speed=0.001 method.routing.entropy_and_bias=true",
    "frozen": "method/routing=frozen",
}


@torch.no_grad()
def collapse(model: Any, batches: list[dict[str, Tensor]], strength: float, favourites: int, seed: int) -> None:
    """Spoil the routers one after the other, each with the mean hidden state behind the spoilt ones before it."""
    rng = random.Random(seed)
    for router in find_routers(model).values():
        hidden: list[Tensor] = []
        handle = router.register_forward_pre_hook(lambda m, args, h=hidden: h.append(args[0].flatten(0, -2)))
        for batch in batches:
            model.base_model(batch["input_ids"], use_cache=False)
        handle.remove()
        mean_H = torch.cat(hidden).float().mean(0)
        sign_E = -torch.ones(router.num_experts)
        sign_E[rng.sample(range(router.num_experts), favourites)] = 1
        router.weight += strength * sign_E[:, None] * mean_H / mean_H.dot(mean_H)


def select_batches(run: Run, windows: int) -> list[dict[str, Tensor]]:
    assert run.data.select_tokens is not None
    return document_batches(run.data.select_tokens, length=256, batch_size=16, boundary=None, limit=windows)


def measure(model: Any, start: Any, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Held-out loss, and loads of `model` with its routing compared with that of `start`."""
    routers = list(find_routers(model).values())
    taps = [RouterTap(find_routers(m)) for m in (model, start)]
    sums = statistics.empty(len(routers), int(routers[0].num_experts), torch.device("cpu"))  # type: ignore[arg-type]
    with inference([model, start]):
        for batch in batches:
            for tap, m in zip(taps, (model, start)):
                with tap.record():
                    m.base_model(batch["input_ids"], use_cache=False)
            for row, router in enumerate(routers):
                logits_TE, indices_TK = taps[0].outputs[row]
                real_T = torch.ones(len(logits_TE))
                log_p_TE = log_probabilities(router, logits_TE)
                statistics.add_tokens_(sums[row], log_p_TE, indices_TK, real_T, taps[1].outputs[row][1])
    for tap in taps:
        tap.remove()
    found = dict(zip(statistics.NAMES, statistics.summary(sums).T.tolist()))
    mean = {k: sum(found[k]) / len(routers)
            for k in ("load_entropy_bits", "load_entropy_normalised", "max_over_mean", "topk_changed")}  # fmt: skip
    shares = (statistics.loads(sums)[0] / statistics.loads(sums)[0].sum(-1, keepdim=True)).tolist()
    loss = token_metrics({"x": model}, batches)["x"].loss
    return {"loss": loss, **mean, "unused_experts": int(sum(found["unused_experts"])), "load": shares}


def overrides_of(args: argparse.Namespace, seed: int, folder: Path, model: Path | str) -> list[str]:
    return [f"seed={seed}", f"quant={args.scheme}", f"run_dir={folder}", f"model.path={model}",
            f"trainer.steps={args.steps}", f"method.qat_fraction={args.qat_fraction}", "method.distill_weight=0",
            "trainer.threads=1", "trainer.validate_every=100000", *args.overrides]  # fmt: skip


def settled(args: argparse.Namespace, seed: int) -> Path:
    """Folder with the seed's collapsed base and its unquantised fine-tune, `fp_ft` and `branch`."""
    folder = args.work / f"settled_{seed}"
    base = folder / "collapsed"
    if not base.exists():
        run = make_run(overrides_of(args, seed, folder, "tiny"))
        model = run.load("base")
        collapse(model, run.data.calibration(64), args.strength, args.favourites, seed)
        save_model(model, run.tokenizer, base)
    fine_tune(make_run(overrides_of(args, seed, folder, base.absolute())))
    return folder


def train_variant(args: argparse.Namespace, seed: int, variant: str, shared: Path) -> Any:
    """The QAT student of one variant."""
    own = args.work / "variant"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    for name in ("fp_ft", "branch"):
        (own / name).symlink_to((shared / name).absolute())
    base = (shared / "collapsed").absolute()
    run = make_run([*overrides_of(args, seed, own, base), *VARIANTS[variant].split()])
    return quantise_aware(run)


def rows_of(args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """One seed: base, collapsed base, settled start and FP_ft, then QAT with every variant."""
    shared, rows = settled(args, seed), []
    run = make_run(overrides_of(args, seed, shared, (shared / "collapsed").absolute()))
    batches, start = select_batches(run, args.windows), run.load("branch")
    shipped = make_run(overrides_of(args, seed, shared, "tiny")).load("base")
    points = {"shipped": shipped, "collapsed": run.load("base"), "settled": start, "fp_ft": run.load("fp_ft")}
    before = measure(start, start, batches)
    for name, model in points.items():
        rows.append({"variant": name, "seed": seed, "loss_before": None, **measure(model, start, batches)})
    for variant in args.variants:
        file = args.work / "rows" / f"{variant}_{seed}.json"
        settings = {"overrides": VARIANTS[variant], "options": options(args)}
        kept = json.loads(file.read_text()) if file.exists() else {}
        if kept.get("settings") != settings:
            student = train_variant(args, seed, variant, shared)
            row = {"variant": variant, "seed": seed, "overrides": VARIANTS[variant], "loss_before": before["loss"],
                   **measure(student, start, batches), "commit": git_commit()}  # fmt: skip
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(kept := {"settings": settings, "row": row}))
        rows.append(kept["row"])
    for row in rows:
        print(f"seed {seed} {row['variant']:<20} loss {row['loss']:.4f}  entropy {row['load_entropy_bits']:.3f} bits "
              f"({row['load_entropy_normalised']:.3f})  unused {row['unused_experts']}  "
              f"changed {row['topk_changed']:.3f}", flush=True)  # fmt: skip
    return rows


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What a kept row must have been made with."""
    keys = ("scheme", "steps", "qat_fraction", "strength", "favourites", "windows", "overrides")
    return {key: getattr(args, key) for key in keys}


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard error over seeds of every variant."""
    found = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        entry: dict[str, Any] = {"variant": variant, "seeds": len(own)}
        for key in ("loss", "load_entropy_bits", "load_entropy_normalised", "unused_experts", "max_over_mean"):
            values = [row[key] for row in own]
            mean = sum(values) / len(values)
            spread = sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
            entry[key], entry[f"{key}_se"] = mean, math.sqrt(spread / len(values))
        found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scheme", default="w4a16_g32")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps: settling and QAT together")
    parser.add_argument("--qat-fraction", type=float, default=0.5)
    parser.add_argument(
        "--strength", type=float, default=12.0, help="s: logits by which favourites and rest move apart"
    )
    parser.add_argument("--favourites", type=int, default=2, help="experts of a layer that take nearly everything")
    parser.add_argument("--windows", type=int, default=512, help="held-out windows of 256 tokens")
    parser.add_argument("--work", type=Path, default=Path("outputs/routing"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every run")
    args = parser.parse_args()
    rows = [row for seed in args.seeds for row in rows_of(args, seed)]
    facts = {"command": shlex.join(["python", "-m", "benchmarks.routing", *sys.argv[1:]]), "commit": git_commit(),
             "part": "select", "options": options(args), "table": table(rows), "rows": rows}  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
