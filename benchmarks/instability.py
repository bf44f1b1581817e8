"""Does the precision scheduler make a planted instability smaller and shorter? `python -m benchmarks.instability`
writes docs/results/instability.json.

At a fixed step of QAT one of two things goes wrong, the same in both variants:

    lr_burst   the learning rate of every group times `--factor` for `--burst` steps
    garbage    a batch of uniformly random tokens, inputs and labels
    none       nothing: what the scheduler does when there is nothing to do

After every step the loss on one fixed held-out batch is taken twice: with the precision that stands (`curve`), which a
raised group lowers by itself, and with every group at its target (`curve_target`, `target_…`), which is what would be
served. With `before` the mean over the 10 steps before the fault and excess = loss − before:

    height     largest excess from the fault on
    duration   steps from the fault to the last one with excess > tolerance
    area       sum of the positive excess, in nats · steps
    final      loss at the end of the run, everything at its target again

One unquantised fine-tune a seed gives the branch point and the teacher. Rows are kept in the work folder.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.quality import ROOT, make_run, share_data
from qdeepseek.data.sources import DataError
from qdeepseek.train.callbacks.precision import Precision
from qdeepseek.train.events import read_events
from qdeepseek.train.provenance import git_commit
from qdeepseek.train.qat import Run, fine_tune, quantise_aware

OUT = ROOT / "docs" / "results" / "instability.json"
FAULTS = ("lr_burst", "garbage", "none")
VARIANTS = {"off": "off", "scheduler": "scheduler"}
BEFORE = 10


class Fault(L.Callback):
    """One planted fault, at optimizer step `at` (of QAT)."""

    def __init__(self, kind: str, at: int, factor: float, burst: int, seed: int, vocabulary: int):
        self.kind, self.at, self.factor, self.burst = kind, at, factor, burst
        self.seed, self.vocabulary = seed, vocabulary
        self._last = -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self.kind == "garbage" and step == self.at:
            generator = torch.Generator().manual_seed(1000 + self.seed)
            ids = torch.randint(0, self.vocabulary, batch["input_ids"].shape, generator=generator)
            batch["input_ids"].copy_(ids)
            batch["labels"].copy_(ids)
        if self.kind == "lr_burst" and self.at <= step < self.at + self.burst and step != self._last:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= self.factor  # the schedule sets the next step's rate from its own base
        self._last = step


class Probe(L.Callback):
    """Loss on one held-out batch after every optimizer step, as precision stands and at the target."""

    def __init__(self, batch: dict[str, torch.Tensor], precision: Precision | None):
        self.batch, self.precision = batch, precision
        self.curve: list[float] = []
        self.curve_target: list[float] = []

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == len(self.curve) + 1:
            moved = {name: tensor.to(pl_module.device) for name, tensor in self.batch.items()}
            pl_module.model.eval()
            self.curve.append(float(pl_module.losses(moved, distill=False)[0]))
            if self.precision is None or not any(self.precision.scheduler.rungs):
                self.curve_target.append(self.curve[-1])
            else:
                with self.precision.at_target():
                    self.curve_target.append(float(pl_module.losses(moved, distill=False)[0]))
            pl_module.model.train()


def measures(curve: list[float], at: int, tolerance: float) -> dict[str, float]:
    """Height, duration and area of the excess over the mean of the steps before the fault; see the module."""
    before = sum(curve[max(0, at - BEFORE) : at]) / len(curve[max(0, at - BEFORE) : at])
    excess = [loss - before for loss in curve[at:]]
    above = [i for i, e in enumerate(excess) if e > tolerance]
    return {"before": before, "height": max(excess), "duration": above[-1] + 1 if above else 0,
            "area": sum(max(0.0, e) for e in excess), "final": curve[-1]}  # fmt: skip


def probe_batch(run: Run, sequences: int) -> dict[str, torch.Tensor]:
    if len(run.data.select) < 1:  # type: ignore[arg-type]
        raise DataError("the select part is empty; give more held-out data")
    size = min(sequences, len(run.data.select))  # type: ignore[arg-type]
    return run.data.collate([run.data.select[i] for i in range(size)])


def one(args: argparse.Namespace, seed: int, fault: str, variant: str) -> dict[str, Any]:
    """A row; taken from the work folder when it is there."""
    file = args.work / "rows" / f"{fault}_{variant}_{seed}.json"
    if file.exists():
        return json.loads(file.read_text())
    shared, folder = args.work / f"fp_{seed}", args.work / f"{fault}_{variant}_{seed}"
    common = [f"seed={seed}", f"quant={args.quant}", "trainer.validate_every=100000",
              "trainer.checkpoint_every=100000", *args.overrides]  # fmt: skip
    fine_tune(share_data(make_run([*common, f"run_dir={shared}"])))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("fp_ft", "branch"):
        if (shared / name).exists():
            (folder / name).symlink_to((shared / name).absolute())
    run = share_data(make_run([*common, f"method/precision={VARIANTS[variant]}", f"run_dir={folder}", *(
        args.scheduler if variant == "scheduler" else []
    )]))  # fmt: skip
    at = args.at if args.at is not None else run.qat_steps // 2
    vocabulary = int(run.base_config.vocab_size)
    probe = Probe(probe_batch(run, args.probe), run.methods.get("precision"))
    run.callbacks = (Fault(fault, at, args.factor, args.burst, seed, vocabulary), probe)
    quantise_aware(run)
    events = read_events(folder, "precision")
    served = measures(probe.curve_target, at, args.tolerance)
    row = {"fault": fault, "variant": variant, "seed": seed, "at": at, **measures(probe.curve, at, args.tolerance),
           **{f"target_{name}": value for name, value in served.items()},
           "raised": sum(e["reason"] in ("spike", "non-finite") for e in events),
           "raised_before": sum(e["reason"] in ("spike", "non-finite") and e["step"] <= at for e in events),
           "seconds": run.seconds["qat"], "curve": probe.curve,
           "curve_target": probe.curve_target}  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(row))
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quant", default="w4a16_g32")
    parser.add_argument("--at", type=int, default=None, help="step of QAT at which it goes wrong; default its middle")
    parser.add_argument("--factor", type=float, default=30.0, help="on the learning rate, during the burst")
    parser.add_argument("--burst", type=int, default=3, help="steps of the burst")
    parser.add_argument("--probe", type=int, default=8, help="held-out sequences of the loss after every step")
    parser.add_argument("--tolerance", type=float, default=0.01, help="excess in nats that counts as over")
    parser.add_argument("--scheduler", nargs="*", default=[], help="overrides of the scheduler, method.precision.…")
    parser.add_argument("--work", type=Path, default=Path("outputs/instability"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every run")
    args = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for seed in args.seeds:
        for fault in args.faults:
            for variant in VARIANTS:
                rows.append(one(args, seed, fault, variant))
                r = rows[-1]
                print(f"{fault:9} {variant:9} seed {seed}: height {r['height']:+.4f}, {r['duration']} steps, area "
                      f"{r['area']:.3f}; at the target {r['target_height']:+.4f}, {r['target_duration']} steps, "
                      f"{r['target_area']:.3f}; final {r['final']:.4f}, raised {r['raised']}", flush=True)  # fmt: skip
    command = "python -m benchmarks.instability " + " ".join(sys.argv[1:] if arguments is None else arguments)
    content = {"command": command.strip(), "commit": git_commit(), "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
