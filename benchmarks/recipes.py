"""Search for the QAT recipe on the select split: `python -m benchmarks.recipes --scheme w4a16_g32 …`.

Every variant starts from one unquantised fine-tune per seed (FP_ft and its branch point), is trained with the
overrides of its line, and is scored on the select part: loss, KL to FP_ft and the gap recovered against RTN of
FP_ft. Nothing here reads the report part.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

from benchmarks.quality import make_run
from eval.heldout import document_batches
from eval.token_metrics import token_metrics
from qdeepseek.surgery import prepare
from qdeepseek.train.provenance import git_commit
from qdeepseek.train.qat import Run, fine_tune, quantise_aware


def score(run: Run, models: dict[str, Any]) -> dict[str, dict[str, float]]:
    assert run.data.select_tokens is not None
    batches = document_batches(run.data.select_tokens, length=256, batch_size=16, boundary=None, limit=512)
    found = token_metrics(models, batches, teacher=models["fp_ft"])
    return {name: {"loss": m.loss, "kl": m.kl or 0.0, "agreement": m.agreement or 0.0} for name, m in found.items()}


def variant(base: list[str], scheme: str, seed: int, line: str, folder: Path) -> dict[str, Any]:
    common = [*base, f"quant={scheme}", f"seed={seed}", *line.split()]
    shared_keys = [o for o in line.split() if o.startswith(("trainer.steps", "optim.", "method.qat_fraction"))]
    shared = folder / f"fp_{seed}_{re.sub('[^A-Za-z0-9.]+', '-', '_'.join(shared_keys)) or 'default'}"
    fine_tune(make_run([*base, f"seed={seed}", *shared_keys, f"run_dir={shared}"]))
    own = folder / "work"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    for name in ("fp_ft", "branch"):
        if (shared / name).exists():
            (own / name).symlink_to((shared / name).absolute())
    run = make_run([*common, f"run_dir={own}"])
    student = quantise_aware(run)
    rtn = run.load("fp_ft")
    prepare(rtn, run.recipe)
    found = score(run, {"fp_ft": run.load("fp_ft"), "rtn": rtn, "qat": student})
    gap = {k: (found["rtn"][k] - found["qat"][k]) / (found["rtn"][k] - found["fp_ft"][k]) for k in ("loss", "kl")}
    return {"scheme": scheme, "seed": seed, "overrides": line, **found, "gap_recovered": gap,
            "seconds": run.seconds["qat"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", nargs="+", default=["w4a16_g32"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variant", action="append", default=[], help="overrides of one variant, space-separated")
    parser.add_argument("--base", default="", help="overrides of all variants")
    parser.add_argument("--folder", type=Path, default=Path("outputs/recipes"))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows = []
    for line in args.variant or [""]:
        for scheme in args.scheme:
            for seed in args.seeds:
                row = variant(args.base.split(), scheme, seed, line, args.folder)
                rows.append(row)
                g, delta = row["gap_recovered"], {k: row[k]["loss"] - row["fp_ft"]["loss"] for k in ("rtn", "qat")}
                print(f"{scheme} seed {seed} [{line}] fp {row['fp_ft']['loss']:.4f} rtn {delta['rtn']:+.4f} "
                      f"kl {row['rtn']['kl']:.4f} | qat {delta['qat']:+.4f} "
                      f"kl {row['qat']['kl']:.4f} | recovered {g['loss']:.3f} {g['kl']:.3f} | "
                      f"{row['seconds']:.0f} s", flush=True)  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({"commit": git_commit(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
