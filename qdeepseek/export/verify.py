"""Proves an export: `verify(folder)` reads every byte of it again and says what does not hold.

files      each has the SHA-256 and size of the manifest, none is missing, none is unlisted
tensors    shapes, dtypes and padding as the format wants them, scales finite and positive, codes on the grid
config     targets and ignore list give every module of the checkpoint the scheme of the manifest
reference  compressed-tensors' own decompression returns the same weights, bit for bit
model      codes, scales and zero points are those of a prepared model, bit for bit; so are the kept tensors
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qdeepseek.export import names, quantization_config
from qdeepseek.export.compressed_tensors import DTYPES
from qdeepseek.export.entries import entries_of
from qdeepseek.export.loader import Export, Packed
from qdeepseek.export.packing import pack, packed_width
from qdeepseek.export.quantization_config import ModuleFormat
from qdeepseek.export.sources import ModelSource
from qdeepseek.export.writer import MANIFEST
from qdeepseek.surgery.kv_cache import kv_cache_of

SHOWN = 20


@dataclass(frozen=True)
class VerifyReport:
    """What was checked and what failed; `ok` if nothing did."""

    folder: Path
    files: int
    quantized_modules: int
    kept_tensors: int
    reference: str | None
    compared_with_model: bool
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok, "files": self.files, "quantized_modules": self.quantized_modules,
            "kept_tensors": self.kept_tensors, "reference": self.reference,
            "compared_with_model": self.compared_with_model, "problems": list(self.problems),
        }  # fmt: skip

    def __str__(self) -> str:
        checked = f"{self.files} files, {self.quantized_modules} quantised modules, {self.kept_tensors} kept tensors"
        against = [self.reference] if self.reference else []
        against += ["the prepared model"] if self.compared_with_model else []
        equal = f", equal bit for bit to {' and '.join(against)}" if against else ""
        if self.ok:
            return f"{self.folder}: verified, {checked}{equal}"
        shown = "\n- ".join(self.problems[:SHOWN])
        more = f"\n- and {len(self.problems) - SHOWN} more" if len(self.problems) > SHOWN else ""
        return f"{self.folder}: {len(self.problems)} problems in {checked}:\n- {shown}{more}"


def verify(folder: Path | str, model: nn.Module | None = None, *, reference: bool = True) -> VerifyReport:
    """Checks an export; with a prepared `model` also that it is that model's.

    reference  compare with compressed-tensors' decompression
    """
    folder = Path(folder)
    try:
        export = Export(folder)
    except (ValueError, OSError) as error:
        return VerifyReport(folder, 0, 0, 0, None, False, (str(error),))
    problems = [*_file_problems(export), *_name_problems(export), *_config_problems(export)]
    expected = _expected(export, model) if model is not None else None
    for module in export.modules:
        try:
            packed = export.read(module)
        except (ValueError, RuntimeError) as error:
            problems.append(f"{module}: {error}")
            continue
        problems += _tensor_problems(export, packed)
        if reference:
            problems += _reference_problems(export, packed)
    if expected is not None:
        problems += expected
    label = f"compressed-tensors {version('compressed-tensors')}" if reference else None
    return VerifyReport(
        folder, len(export.manifest.files), len(export.modules), len(export.kept), label, model is not None,
        tuple(problems),
    )  # fmt: skip


def _file_problems(export: Export) -> Iterator[str]:
    listed = export.manifest.files
    for name, file in listed.items():
        path = export.folder / name
        if not path.is_file():
            yield f"{name} is missing"
            continue
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if (digest, path.stat().st_size) != (file.sha256, file.bytes):
            yield f"{name} was changed: SHA-256 {digest}, {path.stat().st_size} bytes, not those of the manifest"
    for path in sorted(export.folder.iterdir()):
        if path.name not in listed and path.name != MANIFEST:
            yield f"{path.name} is not listed in the manifest"


def _name_problems(export: Export) -> Iterator[str]:
    """Every parameter of the manifest is stored, packed or kept as it says."""
    layout = export.manifest.layout
    packed = {names.to_model(f"{module}.weight", layout).parameter for module in export.modules}
    copied = set(export.manifest.raw["copied_from_source"])
    kept = {names.to_model(name, layout).parameter for name in export.kept if name not in copied}
    for parameter, module_format in export.manifest.formats.items():
        if parameter not in (packed if module_format else kept):
            yield f"{parameter} is {'not packed' if module_format else 'missing'}"
    for parameter in sorted((packed | kept) - set(export.manifest.formats)):
        yield f"{parameter} is stored and not in the manifest"


def _config_problems(export: Export) -> Iterator[str]:
    config = json.loads((export.folder / "config.json").read_text()).get("quantization_config", {})
    groups, ignore = config.get("config_groups", {}), config.get("ignore", [])
    latent = bool((export.manifest.raw.get("kv_cache") or {}).get("latent"))
    kv_cache = quantization_config.kv_cache_arguments(export.manifest.kv_cache, latent)
    if config.get("kv_cache_scheme") != kv_cache:
        yield f"config.json has kv_cache_scheme {config.get('kv_cache_scheme')}, the manifest wants {kv_cache}"
    for module in export.modules:
        want = export.format_of(module)
        group = _group_of(module, groups, want.is_linear)
        if any(_matches(module, target) for target in ignore):
            yield f"config.json ignores {module}, which is quantised"
        elif group is None:
            yield f"config.json has no target for {module}, which is quantised"
        elif not _same(group, want):
            yield f"config.json gives {module} {group['weights']}, {group['input_activations']}, not {want}"
    for name in export.kept:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or len(export.checkpoint.info(name).shape) != 2:
            continue
        linear = not module.rpartition(".")[2].startswith("embed")
        ignored = any(_matches(module, target) for target in ignore)
        if not ignored and (_group_of(module, groups, linear) is not None):
            yield f"config.json quantises {module}, which is kept; it belongs into ignore"


def _group_of(module: str, groups: dict, linear: bool) -> dict | None:
    """The group compressed-tensors gives a module: by name, by expression, then by class."""
    by_target = [(target, group) for group in groups.values() for target in group["targets"]]
    for kind in (lambda t: t == module, lambda t: t.startswith("re:") and _matches(module, t)):
        for target, group in by_target:
            if kind(target):
                return group
    return next((group for target, group in by_target if linear and target == "Linear"), None)


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _same(group: dict, want: ModuleFormat) -> bool:
    weights = quantization_config.arguments(want.weight, dynamic=False)
    inputs = quantization_config.arguments(want.input, dynamic=True)
    return group["weights"] == weights and group["input_activations"] == inputs


def _tensor_problems(export: Export, packed: Packed) -> Iterator[str]:
    scheme, module = packed.scheme, packed.module
    rows, columns = packed.codes_OI.shape
    info = export.checkpoint.info(f"{module}.weight_packed")
    if (info.dtype, info.shape) != (torch.int32, (rows, packed_width(columns, scheme.bits))):
        yield f"{module}.weight_packed is {info.dtype} {info.shape} for {rows} x {columns} codes of {scheme.bits} bits"
    if packed.scale_OG.dtype != scheme.torch_scale_dtype:
        yield f"{module}.weight_scale is {packed.scale_OG.dtype}, trained was {scheme.scale_dtype}"
    if not bool(packed.scale_OG.isfinite().all()) or not bool((packed.scale_OG > 0).all()):
        yield f"{module}.weight_scale holds values that are not finite and positive"
    if int(packed.codes_OI.min()) < scheme.qmin:
        yield f"{module} has codes below {scheme.qmin}, which the {scheme.grid} grid does not use"
    if not torch.equal(pack(packed.codes_OI, scheme.bits), export.checkpoint.read(f"{module}.weight_packed")):
        yield f"{module}.weight_packed has bits set in its padding"
    if not bool(packed.dequantize(torch.float32).isfinite().all()):
        yield f"{module} dequantises to values that are not finite"


def _reference_problems(export: Export, packed: Packed) -> Iterator[str]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    stored = {p: f"{packed.module}.{p}" for p in parts if f"{packed.module}.{p}" in export.checkpoint}
    arguments: Any = quantization_config.arguments(packed.scheme, dynamic=False)
    compressor: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    reference = compressor.decompress(
        {part: export.checkpoint.read(name) for part, name in stored.items()},
        QuantizationScheme(targets=[packed.module], weights=arguments),
    )["weight"]
    # without serve_dtype: the library multiplies in the dtype of the scale
    ours = replace(packed, scheme=replace(packed.scheme, serve_dtype=None)).dequantize(packed.scale_OG.dtype)
    if not torch.equal(ours, reference):
        yield f"{packed.module}: compressed-tensors decompresses it to other weights"


def _expected(export: Export, model: nn.Module) -> Iterator[str]:
    """Compares everything stored with what the prepared model would export now."""
    layout, reader = export.manifest.layout, ModelSource(model)
    if kv_cache_of(model) != export.manifest.kv_cache:
        yield f"the model's KV cache is {kv_cache_of(model)}, the manifest says {export.manifest.kv_cache}"
    dtype = next(t for t, name in DTYPES.items() if name == export.manifest.dtype)
    for entry in entries_of(model):
        if (entry.format is None) != (export.manifest.formats.get(entry.whole) is None):
            yield f"{entry.parameter} is quantised in one of model and export only"
            continue
        for expert in entry.experts:
            weight = reader.weight(entry.parameter, expert)
            pieces = entry.pieces(expert, layout)
            if entry.quantized is None:
                suffix = ".weight" if expert is not None or entry.parameter.endswith(".weight") else ""
                for piece in pieces:
                    value = names.rows_of(piece.part, weight).to(entry.kept_dtype(dtype, weight)).cpu()
                    yield from _unequal(f"{piece.module}{suffix}", export.checkpoint.read(piece.module + suffix), value)
                continue
            trained = reader.quantizer(entry.quantized, expert, weight).quantize(weight)
            for piece in pieces:
                packed = export.read(piece.module)
                stored = (packed.codes_OI, packed.scale_OG, packed.zero_OG)
                for what, a, b in zip(("codes", "scale", "zero point"), stored, trained, strict=True):
                    own = None if b is None else names.rows_of(piece.part, b).cpu()
                    yield from _unequal(f"{piece.module}: {what}", a, own)


def _unequal(what: str, stored: Tensor | None, trained: Tensor | None) -> Iterator[str]:
    if stored is None or trained is None:
        if stored is not trained:
            yield f"{what}: stored and trained differ in having one"
    elif stored.dtype != trained.dtype or not torch.equal(stored, trained):
        yield f"{what} of the export and of the model differ"
