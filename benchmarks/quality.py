"""QAT against its peers: same model, same tokens, same run. `python -m benchmarks.quality` writes
docs/results/quality.json.

For every seed one unquantised fine-tune gives FP_ft (ceiling, teacher, and what RTN, GPTQ and AutoRound
quantise) and its branch point (where QAT starts, so that all columns have seen the same tokens). torchao's QAT
gets the same steps, branch point and distillation; it fake-quantises `nn.Linear` only and skips fused experts,
so it is reported as it is (`torchao_qat`, see its quantized_share) and with the experts rewritten as Linear
layers for it (`torchao_qat_unfused`, the coverage of the others). Everything is scored on the report part with
FP_ft as teacher.

Rows are kept in the work folder and reused when the command is run again.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "results" / "quality.json"
SCHEMES = ("w4a16_g128", "w4a16_g32", "w4a8", "w4a4", "w3a16_g32", "w2a16_g32")
OPTIMIZERS = {"w4a4": "qat_w3", "w3a16_g32": "qat_w3", "w2a16_g32": "qat_w2"}
METHODS = ("qat", "rtn", "gptq", "rtn_rotated", "gptq_rotated", "autoround", "torchao_qat", "torchao_qat_unfused")
ROTATED = ("w4a4",)  # schemes whose QAT starts from rotated weights: there the baselines are run rotated too


def make_run(overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from qdeepseek.train.qat import Run

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return Run.from_config(OmegaConf.to_container(compose("train", overrides=overrides), resolve=True))  # type: ignore[arg-type]


_data: dict[int, Any] = {}
_states: dict[int, Any] = {}  # the teacher's hidden states on the report part, by seed


def share_data(run: Any) -> Any:
    """The run with this process's tokenised corpus, which is the same for all tasks of a seed."""
    run.__dict__["data"] = _data.setdefault(run.seed, _data.get(run.seed) or run.data)
    return run


def overrides_of(args: argparse.Namespace, seed: int, scheme: str, folder: Path) -> list[str]:
    return [f"seed={seed}", f"quant={scheme}", f"run_dir={folder}",
            f"optim@qat_optim={OPTIMIZERS.get(scheme, 'qat')}", "trainer.threads=1",
            "trainer.validate_every=100000", *args.overrides]  # fmt: skip


def own_folder(args: argparse.Namespace, seed: int, *names: str) -> Path:
    """A fresh folder of one task, with the seed's FP_ft and branch point in it."""
    folder = args.work / "_".join([str(seed), *names])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("fp_ft", "branch"):
        (folder / name).symlink_to((args.work / f"fp_{seed}" / name).absolute())
    return folder


def fp_ft(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The seed's unquantised run, and the rows of base and FP_ft, which every scheme shares."""
    from qdeepseek.train.qat import fine_tune

    file = args.work / "rows" / f"fp_{seed}.json"
    if not file.exists():
        run = share_data(make_run(overrides_of(args, seed, "off", args.work / f"fp_{seed}")))
        fine_tune(run)
        rows = {"fp_ft": score(run, run.load("fp_ft")), "base": score(run, run.load("base"))}
        file.write_text(json.dumps(rows))
    return json.loads(file.read_text())


def score(run: Any, model: Any) -> dict[str, float]:
    from eval.compare import report_batches
    from eval.token_metrics import token_metrics

    remember = _states.setdefault(run.seed, [])
    m = token_metrics({"x": model}, report_batches(run.data), teacher=run.load("fp_ft"), remember=remember)["x"]
    return {"loss": m.loss, "kl": m.kl or 0.0, "agreement": m.agreement or 0.0}


def task(args: argparse.Namespace, seed: int, scheme: str, method: str) -> list[dict[str, Any]]:
    """Rows of one method at one scheme and seed."""
    import torch

    from benchmarks import methods
    from qdeepseek.train.provenance import git_commit

    torch.set_num_threads(1)
    run = share_data(make_run(overrides_of(args, seed, scheme, own_folder(args, seed, scheme, method))))
    rows = []
    for name, model, share, bits in methods.models(run, scheme, method):
        rows.append({"scheme": scheme, "method": name, "seed": seed, **score(run, model),
                     "quantized_share": share, "bits_per_weight": bits, "commit": git_commit()})  # fmt: skip
    return rows


def collect(args: argparse.Namespace) -> list[dict[str, Any]]:
    cache = args.work / "rows"
    cache.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        firsts = {pool.submit(fp_ft, args, seed): seed for seed in args.seeds}
        for future in as_completed(firsts):
            for method, found in future.result().items():
                rows += [{"scheme": s, "method": method, "seed": firsts[future], **found, "quantized_share": 0.0,
                          "bits_per_weight": 16.0} for s in args.schemes]  # fmt: skip
            print(f"fp_ft of seed {firsts[future]} done", flush=True)
        waiting = {}
        for method in args.methods:
            for scheme in args.schemes:
                if method.endswith("_rotated") and scheme not in ROTATED:
                    continue
                for seed in args.seeds:
                    file = cache / f"{scheme}_{method}_{seed}.json"
                    if file.exists():
                        rows += json.loads(file.read_text())
                    elif not args.finished_only:
                        waiting[pool.submit(task, args, seed, scheme, method)] = file
        for future in as_completed(waiting):
            file = waiting[future]
            error = future.exception()
            if error is not None:
                print(f"{file.stem}: FAILED {type(error).__name__}: {error}", flush=True)
                continue
            file.write_text(json.dumps(future.result()))
            rows += future.result()
            for row in future.result():
                print(f"{file.stem}: {row['method']} loss {row['loss']:.4f} kl {row['kl']:.4f}", flush=True)
    return sorted(rows, key=lambda r: (SCHEMES.index(r["scheme"]), r["seed"], r["method"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--finished-only", action="store_true", help="write the rows that exist, start none")
    parser.add_argument("--work", type=Path, default=Path("outputs/quality"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every run")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    args.work.mkdir(parents=True, exist_ok=True)
    rows = collect(args)
    from qdeepseek.train.provenance import git_commit

    command = "python -m benchmarks.quality " + " ".join(sys.argv[1:])
    args.out.write_text(json.dumps({"command": command.strip(), "commit": git_commit(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
