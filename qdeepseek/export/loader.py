"""Loads an export back: w_hat = (codes - zero) · scale, bit for bit the weights of the fake-quant forward.

    load(model, folder)            a plain transformers model gets the dequantised weights
    load_prepared(model, folder)   the same, then quantised again with the stored scales: codes come out unchanged,
                                   inputs and the KV cache are quantised as they were in training

The caller builds the model from the folder's config without weights, in the dtype it wants to compute in. Tensors
are read one at a time; experts go to their slice of the fused parameter. Unlike transformers' own loader this one
takes asymmetric schemes and experts with several schemes, and computes the product in fp32.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from qdeepseek.export import manifest, names
from qdeepseek.export.checkpoint import Checkpoint
from qdeepseek.export.manifest import Manifest
from qdeepseek.export.names import ModelName
from qdeepseek.export.packing import unpack, unpack_zero_point
from qdeepseek.export.quantization_config import ModuleFormat
from qdeepseek.quant import QuantScheme, dequantize
from qdeepseek.surgery import Recipe, Rule, TensorScheme, prepare, quantized_tensors
from qdeepseek.surgery.kv_cache import attach_kv_cache


@dataclass(frozen=True)
class Packed:
    """One quantised module as stored: codes (O, I) int8, scale and zero point in the shape of the scheme."""

    module: str
    where: ModelName
    scheme: QuantScheme
    codes_OI: Tensor
    scale_OG: Tensor
    zero_OG: Tensor | None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.codes_OI, self.scale_OG, self.zero_OG, self.scheme, dtype)


class Export:
    """An export folder opened for reading: its manifest, and its tensors one at a time."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.manifest: Manifest = manifest.read(self.folder)
        self.checkpoint = Checkpoint(self.folder)
        suffix = ".weight_packed"
        self.modules = [n.removesuffix(suffix) for n in self.checkpoint if n.endswith(suffix)]
        parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
        owned = {f"{module}.{part}" for module in self.modules for part in parts}
        self.kept = [name for name in self.checkpoint if name not in owned]

    def format_of(self, module: str) -> ModuleFormat:
        """Format of a quantised module; raises ValueError if the manifest knows none for it."""
        where = names.to_model(f"{module}.weight", self.manifest.layout)
        found = self.manifest.formats.get(where.parameter)
        if found is None:
            raise ValueError(
                f"{self.folder}: {module} is packed, and the manifest names no scheme for {where.parameter}"
            )
        return found

    def read(self, module: str) -> Packed:
        """Unpacks one quantised module."""
        scheme = self.format_of(module).weight
        rows, columns = self.checkpoint.read(f"{module}.weight_shape").tolist()
        shape = scheme.scale_shape((rows, columns))
        scale = self.checkpoint.read(f"{module}.weight_scale").reshape(shape)
        zero = None
        if not scheme.symmetric:
            stored = self.checkpoint.read(f"{module}.weight_zero_point")
            per_tensor = scheme.granularity == "per_tensor"
            zero = stored.reshape(shape) if per_tensor else unpack_zero_point(stored, scheme.bits, rows)
        codes = unpack(self.checkpoint.read(f"{module}.weight_packed"), scheme.bits, columns)
        where = names.to_model(f"{module}.weight", self.manifest.layout)
        return Packed(module, where, scheme, codes, scale, zero)

    def packed(self) -> Iterator[Packed]:
        """All quantised modules, in the order of the shards."""
        return (self.read(module) for module in self.modules)


def load(model: nn.Module, folder: Path | str) -> nn.Module:
    """Fills a plain model, built from the folder's config, with the weights the export stands for.

    Each parameter keeps its dtype; w_hat is computed in fp32 and rounded to it once (first to serve_dtype, if the
    scheme names one). Raises ValueError naming tensors that are missing, left over or of another shape.
    """
    export = Export(folder)
    state = model.state_dict(keep_vars=True)
    filled: set[str] = set()
    tied = _tied(state)
    with torch.no_grad():
        for packed in export.packed():
            target = _target(state, packed.where, packed.module)
            _copy(target, packed.dequantize(target.dtype), packed.module)
            filled.add(packed.where.parameter)
        for name in export.kept:
            where = names.to_model(name, export.manifest.layout)
            if where.parameter not in state:
                if name in export.manifest.raw["copied_from_source"]:
                    continue
                raise ValueError(f"{folder}: {name} has no place in {type(model).__name__}; was its config changed?")
            _copy(_target(state, where, name), export.checkpoint.read(name), name)
            filled.add(where.parameter)
    filled |= {name for name, first in tied.items() if first in filled}
    missing = sorted(set(state) - filled)
    if missing:
        raise ValueError(
            f"{folder} has no weights for {len(missing)} parameters of {type(model).__name__}, first {missing[0]}"
        )
    return model


def load_prepared(model: nn.Module, folder: Path | str, *, experts: str = "grouped_mm") -> nn.Module:
    """`load`, then surgery with the stored schemes and scales: the forward of training, with activations and KV cache.

    experts  matrix multiplication of the routed experts, as in surgery.prepare
    """
    load(model, folder)
    export = Export(folder)
    prepare(model, stored_recipe(export.manifest), initialize=False, experts=experts)
    if export.manifest.kv_cache is not None:
        attach_kv_cache(model, export.manifest.kv_cache)
    collected: dict[str, list[Packed]] = {}
    tensors = {tensor.name: tensor for tensor in quantized_tensors(model)}
    for packed in export.packed():
        collected.setdefault(packed.where.parameter, []).append(packed)
    for name, tensor in tensors.items():
        scale, zero = _join(collected[name])
        device = tensor.weight.device
        tensor.quantizer.set_scale(scale.to(device), None if zero is None else zero.to(device))
    return model


def stored_recipe(stored: Manifest) -> Recipe:
    """A recipe with one rule for each module the manifest names, which prepares a model as it was exported."""
    by_module: dict[str, dict[str, ModuleFormat]] = {}
    for parameter, module_format in stored.formats.items():
        if module_format is not None:
            module, _, key = parameter.rpartition(".")
            by_module.setdefault(module, {})[key] = module_format
    rules = []
    for module, formats in by_module.items():
        first, last = next(iter(formats.values())), list(formats.values())[-1]  # of experts: gate_up_proj, down_proj
        scheme = TensorScheme(first.weight, first.input, last.input if last.input != first.input else None)
        rules.append(Rule(re.escape(module), scheme, name=module))
    return Recipe("stored", tuple(rules), min_expert_share=0.0)


def _join(parts: list[Packed]) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of a parameter from its modules: experts stacked, gate above up."""
    if parts[0].where.expert is None:
        return parts[0].scale_OG, parts[0].zero_OG
    order = {"gate": 0, "up": 1, "down": 0}
    parts = sorted(parts, key=lambda p: (p.where.expert, order[p.where.part or "down"]))
    count = (parts[-1].where.expert or 0) + 1
    scale = torch.stack([p.scale_OG for p in parts]).unflatten(0, (count, -1)).flatten(1, 2)
    if parts[0].zero_OG is None:
        return scale, None
    zeros = [p.zero_OG for p in parts if p.zero_OG is not None]
    return scale, torch.stack(zeros).unflatten(0, (count, -1)).flatten(1, 2)


def _target(state: dict[str, Tensor], where: ModelName, name: str) -> Tensor:
    if where.parameter not in state:
        raise ValueError(f"{name} belongs to {where.parameter}, which the model does not have; was its config changed?")
    target = state[where.parameter].detach()
    if where.expert is not None:
        if where.expert >= target.shape[0]:
            raise ValueError(f"{name}: the model has {target.shape[0]} experts; was its config changed?")
        target = names.rows_of(where.part, target[where.expert])
    return target


def _copy(target: Tensor, value: Tensor, name: str) -> None:
    if target.shape != value.shape:
        raise ValueError(
            f"{name} is {tuple(value.shape)}, the model wants {tuple(target.shape)}; was its config changed?"
        )
    target.copy_(value)


def _tied(state: dict[str, Tensor]) -> dict[str, str]:
    """Name -> first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
