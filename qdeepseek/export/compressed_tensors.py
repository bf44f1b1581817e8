"""Exports a prepared model to compressed-tensors `pack-quantized`: codes and scales exactly as the forward used them.

For each quantised Linear, and for each expert of fused ones under the original checkpoint's names:

    weight_packed      int32 [O, ceil(I·B/32)]      codes, packing.py
    weight_scale       scale dtype [O, G]           as trained, never recomputed ([O, 1] per channel, [1] per tensor)
    weight_zero_point  int32 [ceil(O·B/32), G]      asymmetric only (int8 [1] per tensor)
    weight_shape       int64 [2]                    (O, I)

Everything else is written in the serving dtype; routers keep theirs. The model gives names, schemes and config; the
weights come from its memory, or tensor by tensor from a folder when the model is only a skeleton on the meta
device. Format: compressed-tensors 0.20, compressors/pack_quantized.
"""

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qdeepseek.export import config_files, manifest, names, quantization_config
from qdeepseek.export.entries import Entry, entries_of, layout_of
from qdeepseek.export.extras import Extras
from qdeepseek.export.names import Layout
from qdeepseek.export.packing import pack, pack_zero_point
from qdeepseek.export.quantization_config import kv_cache_arguments
from qdeepseek.export.size import export_size
from qdeepseek.export.sources import FolderSource, ModelSource, SchemeMismatch, Source
from qdeepseek.export.writer import MANIFEST, ShardWriter, WrittenFile, atomic_folder, require_space, write_json
from qdeepseek.layers import whole_name
from qdeepseek.quant import QuantScheme
from qdeepseek.surgery import QuantizedTensor, Recipe, plan
from qdeepseek.surgery.kv_cache import caches_latent, kv_cache_of

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True)
class ExportResult:
    """An export on disk: the folder, the bytes of its files, and the manifest that is in it."""

    folder: Path
    bytes: int
    manifest: dict[str, Any]


def export(
    model: nn.Module,
    destination: Path | str,
    *,
    recipe: Recipe | None = None,
    dtype: torch.dtype = torch.bfloat16,
    weights: Path | str | Source | None = None,
    quantizers: Path | str | None = None,
    source: Path | str | None = None,
    tokenizer: Any = None,
    source_model: str | None = None,
    data_hash: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> ExportResult:
    """Writes a prepared model (surgery.prepare) to `destination`, whole or not at all.

    recipe       the recipe asked for; refused (SchemeMismatch) where the model was trained with another
    dtype        serving dtype of everything that is not quantised; routers keep their own
    weights      take the weights from this folder or Source, a tensor at a time; the model may then be on the meta
                 device
    quantizers   trained scales for `weights`, a file of sources.save_quantizers
    source       original checkpoint: its tokenizer, chat template and generation config are copied, and tensors
                 that the model does not have (multi-token prediction) pass through; default `weights`
    tokenizer    saved with save_pretrained instead of being copied from `source`

    Raises SchemeMismatch, ValueError for what cannot be exported, OSError for a full disk; then an earlier export
    in `destination` is what it was.
    """
    destination = Path(destination)
    folder_of_weights = Path(weights) if isinstance(weights, Path | str) else None
    source = Path(source) if source is not None else folder_of_weights
    entries = entries_of(model)
    layout = layout_of(model, entries)
    _check(model, entries, recipe, dtype)
    kv_cache, latent = kv_cache_of(model), caches_latent(model)
    reader: Source = ModelSource(model)
    if folder_of_weights is not None:
        reader = FolderSource(model, layout, folder_of_weights, Path(quantizers) if quantizers else None)
    elif weights is not None:
        reader = weights  # type: ignore[assignment]
    extras = Extras(source, {name for entry in entries for name in entry.original_names(layout)})
    require_space(destination, export_size(entries, dtype).total + extras.nbytes)

    with atomic_folder(destination) as folder:
        shards = ShardWriter(folder, max_shard_bytes)
        for entry in entries:
            for name, tensor in _stored(entry, reader, layout, dtype):
                shards.add(name, tensor)
        for name in extras.names:
            shards.add(name, extras.read(name))
        files = shards.finish()
        config = _quantization_config(entries, extras, layout, kv_cache_arguments(kv_cache, latent))
        config_files.write_config(model, folder, DTYPES[dtype], config)
        config_files.write_companions(model, folder, source, tokenizer)
        files |= _hash_others(folder, files)
        content = manifest.build(
            model_type=str(model.config.model_type),  # type: ignore[union-attr]
            dtype=DTYPES[dtype],
            formats={entry.whole: entry.format for entry in entries},
            files=files,
            coverage=_coverage(model, entries, recipe),
            recipe=recipe.to_dict() if recipe else None,
            source_model=source_model or (source.name if source else None),
            data_hash=data_hash,
            copied=extras.names,
            kv_cache=kv_cache,
            latent=latent,
        )
        write_json(folder / MANIFEST, content)
    return ExportResult(destination, sum(file.bytes for file in files.values()), content)


def pack_module(
    name: str, codes_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor | None, scheme: QuantScheme
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of one quantised module."""
    per_tensor = scheme.granularity == "per_tensor"
    yield f"{name}.weight_packed", pack(codes_OI.cpu(), scheme.bits)
    yield f"{name}.weight_scale", scale_OG.cpu().reshape(-1) if per_tensor else scale_OG.cpu().contiguous()
    if zero_OG is not None:
        zero = zero_OG.cpu()
        yield f"{name}.weight_zero_point", zero.reshape(-1) if per_tensor else pack_zero_point(zero, scheme.bits)
    yield f"{name}.weight_shape", torch.tensor(codes_OI.shape, dtype=torch.int64)


def _stored(entry: Entry, reader: Source, layout: Layout, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Stored tensors of one entry, names as in the checkpoint; one expert in memory at a time."""
    for expert in entry.experts:
        weight = reader.weight(entry.parameter, expert)
        pieces = entry.pieces(expert, layout)
        if entry.quantized is None:
            target = entry.kept_dtype(dtype, weight)
            suffix = ".weight" if expert is not None or entry.parameter.endswith(".weight") else ""
            for piece in pieces:
                yield piece.module + suffix, names.rows_of(piece.part, weight).to(target).cpu()
            continue
        codes, scale, zero = reader.quantizer(entry.quantized, expert, weight).quantize(weight)
        for piece in pieces:
            own_zero = None if zero is None else names.rows_of(piece.part, zero)
            own_codes, own_scale = (names.rows_of(piece.part, t) for t in (codes, scale))
            yield from pack_module(piece.module, own_codes, own_scale, own_zero, entry.quantized.scheme)


def _check(model: nn.Module, entries: list[Entry], recipe: Recipe | None, dtype: torch.dtype) -> None:
    """Everything that can be refused before work starts."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} is no serving dtype; use {', '.join(map(str, DTYPES))}")
    tensors = [entry.quantized for entry in entries if entry.quantized is not None]
    if not tensors:
        raise ValueError("the model has no quantised weight; call surgery.prepare, or save it with save_pretrained")
    for tensor in tensors:
        if not tensor.quantizer.enabled:
            raise ValueError(
                f"{tensor.name}: its quantiser is switched off (delayed fake-quant), so the model does not compute "
                "with quantised weights; train past the delay, or set enabled = True to export it nevertheless"
            )
        if tensor.quantizer.level != "target":
            raise ValueError(
                f"{tensor.name}: its quantiser stands at level {tensor.quantizer.level}, not at its target; turn the "
                "levels into a recipe first (surgery.fusion.keep_levels), or set level = 'target'"
            )
        if tensor.scheme.serve_dtype not in (None, DTYPES[dtype]) and dtype != torch.float32:
            raise SchemeMismatch(
                f"{tensor.name} was trained to be served in {tensor.scheme.serve_dtype} and would be exported in "
                f"{DTYPES[dtype]}; export with that dtype, or train with serve_dtype {DTYPES[dtype]}"
            )
    # a weight trained as rounded to its scale's dtype is exact in fp32 too, if the runtime decompresses in that dtype
    other = {t.scheme.scale_dtype for t in tensors if t.scheme.serve_dtype != t.scheme.scale_dtype} - {DTYPES[dtype]}
    if other:
        warnings.warn(
            f"scales are {', '.join(sorted(other))} and the model is served in {DTYPES[dtype]}: runtimes that load "
            "scales in the model's dtype multiply in it; set scale_dtype to the serving dtype, or serve_dtype to it",
            stacklevel=3,
        )
    if recipe is not None:
        _check_recipe(model, recipe, tensors)


def _check_recipe(model: nn.Module, recipe: Recipe, tensors: list[QuantizedTensor]) -> None:
    trained: dict[str, set[object]] = {}
    for tensor in tensors:
        trained.setdefault(whole_name(tensor.name), set()).add((tensor.scheme, tensor.input))
    for name, scheme in plan(model, recipe).tensors.items():
        asked = None if scheme is None else (scheme.weight, scheme.input_of(name))
        other = trained.get(name, {None}) - {asked}
        if other:
            raise SchemeMismatch(
                f"{name} was trained as {other.pop() or 'unquantised'}, recipe {recipe.name!r} asks for "
                f"{asked or 'unquantised'}; export with the recipe of the training run, or train this one"
            )


def _quantization_config(
    entries: list[Entry], extras: Extras, layout: Layout, kv_cache: dict[str, Any] | None
) -> dict[str, Any]:
    quantized, kept, routers = {}, [], []
    for entry in entries:
        modules = entry.modules(layout)
        if entry.format is not None:
            quantized.update(dict.fromkeys(modules, entry.format))
        elif entry.router:
            routers.extend(modules)
        elif entry.linear:
            kept.extend(modules)
        kept.extend(names.to_checkpoint(alias, layout).removesuffix(".weight") for alias in entry.aliases)
    for module in extras.modules:
        (routers if module.endswith(".gate") else kept).append(module)
    return quantization_config.build(quantized, kept, routers, kv_cache)


def _coverage(model: nn.Module, entries: list[Entry], recipe: Recipe | None) -> dict[str, Any]:
    if recipe is not None:
        coverage = plan(model, recipe).to_dict()
        coverage.pop("tensors")  # the manifest lists them with their schemes
        return coverage
    total = sum(entry.tensor.numel() for entry in entries)
    quantized = sum(entry.tensor.numel() for entry in entries if entry.quantized is not None)
    return {"parameters": total, "quantized_share": quantized / total}


def _hash_others(folder: Path, shards: dict[str, WrittenFile]) -> dict[str, WrittenFile]:
    """Hashes of the small files; those of the shards were taken while they were written."""
    others = sorted(path for path in folder.iterdir() if path.name not in shards)
    return {p.name: WrittenFile(hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_size) for p in others}
