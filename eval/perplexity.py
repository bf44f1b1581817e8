"""Loss and perplexity of a folder: `python -m eval.perplexity FOLDER --data report`.

    perplexity = exp(mean_t −log p(x_t | x_<t)),  windows of `--length` tokens, every token scored once

FOLDER is an export of this project (read back with the forward that was trained) or anything that transformers
loads. `--data` is the report or select part of the standard library, or a JSONL file with a text field.
`--teacher` adds KL and agreement to another folder, usually the unquantised fine-tuned model.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.bootstrap import Estimate, estimate, resampled_means
from eval.heldout import document_batches, jsonl_texts
from eval.token_metrics import TokenMetrics, token_metrics
from eval.words import number, percent, span
from qdeepseek.data.corpus import stdlib_documents
from qdeepseek.data.windows import join_documents
from qdeepseek.export.manifest import MANIFEST
from qdeepseek.train.models import DTYPES, ModelConfig, load_model, load_tokenizer


def load_folder(folder: str, dtype: str) -> PreTrainedModel:
    """A causal language model from an export of this project, a checkpoint folder, or a hub name."""
    if (Path(folder) / MANIFEST).is_file():
        from eval.compare import load_export

        return load_export(Path(folder), dtype)
    return load_model(ModelConfig(path=folder, dtype=dtype))


def texts_of(data: str, field: str) -> Iterable[str]:
    """Documents of a part of the standard library, or of a JSONL file."""
    if data in ("report", "select"):
        return [d.text for d in stdlib_documents() if d.part == data]
    return jsonl_texts(Path(data), field)


def batches_of(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, length: int, batch_size: int, limit: int | None
) -> list[dict[str, Any]]:
    """Windows over the joined texts, with document ids where the tokenizer has a BOS or EOS token."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    tokens = join_documents(texts, encode, bos, eos)
    return document_batches(
        tokens, length=length, batch_size=batch_size, boundary=bos if bos is not None else eos, limit=limit
    )


def estimates(metrics: TokenMetrics, *, resamples: int = 2000, seed: int = 0) -> dict[str, Estimate]:
    """loss, accuracy, and with a teacher kl and agreement, with 95 % intervals over the metrics' units."""
    sums = {"loss": metrics.nll_U, "accuracy": metrics.correct_U, "kl": metrics.kl_U, "agreement": metrics.agree_U}
    found = {}
    for name, sums_U in sums.items():
        if sums_U is not None:
            value = float(sums_U.sum() / metrics.tokens_U.sum())
            draws = resampled_means(sums_U.numpy(), metrics.tokens_U.numpy(), resamples=resamples, seed=seed)[0]
            found[name] = estimate(value, draws) if len(metrics.ids_U) > 1 else Estimate(value)
    return found


def result(folder: str, metrics: TokenMetrics) -> dict[str, Any]:
    """JSON-ready result of one folder."""
    found = estimates(metrics)
    return {
        "folder": folder, "tokens": metrics.tokens, "units": len(metrics.ids_U), "unit": metrics.unit,
        "perplexity": metrics.perplexity, **{name: e.value for name, e in found.items()},
        "ci95": {name: e.interval for name, e in found.items()},
    }  # fmt: skip


def text_of(entry: dict[str, Any]) -> str:
    """One line a measure, values aligned."""
    ci = entry["ci95"]
    lines = [f"{entry['folder']}: {entry['tokens']:,} tokens of {entry['units']:,} {entry['unit']}s"]
    for name in ("loss", "kl"):
        if name in entry:
            lines.append(f"  {name:<11}{number(entry[name]):>9}  {span(ci[name])}")
    lines.insert(2, f"  {'perplexity':<11}{number(entry['perplexity'], 3):>9}")
    for name in ("accuracy", "agreement"):
        if name in entry:
            lines.append(f"  {name:<11}{percent(entry[name], 2):>9}  {span(ci[name], 2, 100)}")
    return "\n".join(line.rstrip() for line in lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.perplexity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="+", help="exports or checkpoints; all share the tokenizer of the first")
    parser.add_argument("--data", default="report", help="report, select, or a JSONL file (default: report)")
    parser.add_argument("--field", default="text", help="field of the JSONL rows (default: text)")
    parser.add_argument("--teacher", help="folder of the unquantised model, for KL and agreement")
    parser.add_argument("--length", type=int, default=256, help="window in tokens (default: 256)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, help="at most this many windows, spread evenly")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Results of all folders, one model beside the teacher at a time."""
    tokenizer = load_tokenizer(ModelConfig(path=args.folder[0]))
    batches = batches_of(
        texts_of(args.data, args.field), tokenizer, length=args.length, batch_size=args.batch_size, limit=args.limit
    )
    teacher = load_folder(args.teacher, args.dtype).to(args.device) if args.teacher else None
    found = []
    for folder in args.folder:
        model = load_folder(folder, args.dtype).to(args.device)
        allowed = getattr(model.config, "max_position_embeddings", None)
        if allowed is not None and args.length > allowed:
            raise ValueError(
                f"--length {args.length} exceeds max_position_embeddings {allowed} of {folder}; use at most {allowed}"
            )
        entry = result(folder, token_metrics({folder: model}, batches, teacher=teacher)[folder])
        print(text_of(entry), flush=True)
        found.append(entry)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    try:
        found = run(args)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
