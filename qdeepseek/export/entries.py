"""The state of a prepared model as an exporter sees it: one entry for each parameter and persistent buffer.

An entry knows the checkpoint modules it is stored as: itself, or for a fused parameter one module for each expert
and projection. The quantisers' own state is not listed; of tied names the first is stored, the others are aliases.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qdeepseek.export import names
from qdeepseek.export.names import Layout
from qdeepseek.export.quantization_config import ModuleFormat
from qdeepseek.layers import ActivationQuantizer, WeightQuantizer, whole_name
from qdeepseek.surgery import QuantizedTensor, part_of, quantized_tensors


@dataclass(frozen=True)
class Piece:
    """One 2-D weight on disk: checkpoint module, and the expert and projection it is in the model."""

    module: str
    expert: int | None = None
    part: str | None = None


@dataclass(frozen=True)
class Entry:
    """One tensor of the model.

    quantized  its quantiser and scheme, None if it is kept
    router     it belongs to a router and keeps its dtype
    linear     its module is an nn.Linear in the model, or one for each expert in the checkpoint
    aliases    other parameter names of the same tensor (an lm_head tied to the embedding), which are not stored
    """

    parameter: str
    tensor: Tensor
    quantized: QuantizedTensor | None
    router: bool
    linear: bool
    aliases: tuple[str, ...] = ()

    @property
    def whole(self) -> str:
        """The parameter's name in a model whose experts are not in chunks."""
        return whole_name(self.parameter)

    @property
    def format(self) -> ModuleFormat | None:
        if self.quantized is None:
            return None
        return ModuleFormat(self.quantized.scheme, self.quantized.input, self.linear)

    @property
    def experts(self) -> list[int | None]:
        """Indices of the 2-D slices to export; [None] for a tensor that is not fused."""
        return list(range(self.tensor.shape[0])) if names.is_fused(self.parameter) else [None]

    def pieces(self, expert: int | None, layout: Layout) -> list[Piece]:
        """What one slice is stored as."""
        if expert is None:
            return [Piece(names.to_checkpoint(self.parameter, layout).removesuffix(".weight"))]
        return [
            Piece(names.expert_module(self.parameter, expert, part, layout), expert, part)
            for part in names.parts_of(self.parameter)
        ]

    def modules(self, layout: Layout) -> list[str]:
        """Checkpoint modules with a 2-D weight that this entry is stored as."""
        if self.experts == [None] and not (self.parameter.endswith(".weight") and self.tensor.ndim == 2):
            return []
        return [piece.module for expert in self.experts for piece in self.pieces(expert, layout)]

    def original_names(self, layout: Layout) -> list[str]:
        """Names of the unquantised tensors in the original checkpoint, which may hold a tied one twice."""
        if self.experts == [None]:
            return [names.to_checkpoint(name, layout) for name in (self.parameter, *self.aliases)]
        return [f"{module}.weight" for module in self.modules(layout)]

    def kept_dtype(self, dtype: torch.dtype, tensor: Tensor | None = None) -> torch.dtype:
        """Dtype in which `tensor` is stored if it is not quantised: the serving dtype, a router's own."""
        tensor = self.tensor if tensor is None else tensor
        return dtype if tensor.is_floating_point() and not self.router else tensor.dtype


def entries_of(model: nn.Module) -> list[Entry]:
    """Entries in model order, chunks of one tensor one after the other, so that they are written as the whole would be.

    Raises ValueError where an adapter has not been merged.
    """
    together: dict[str, list[Entry]] = {}
    for entry in _entries(model):
        together.setdefault(entry.whole, []).append(entry)
    return [entry for entries in together.values() for entry in entries]


def layout_of(model: nn.Module, entries: list[Entry]) -> Layout:
    """Checkpoint names of the model's family."""
    fused = any(entry.experts != [None] for entry in entries)
    return names.layout_of(str(model.config.model_type), fused=fused)  # type: ignore[union-attr]


def _entries(model: nn.Module) -> Iterator[Entry]:
    modules = dict(model.named_modules())
    hidden = {n for n, m in modules.items() if isinstance(m, WeightQuantizer | ActivationQuantizer)}
    quantized = {tensor.name: tensor for tensor in quantized_tensors(model)}
    state = model.state_dict(keep_vars=True)
    sharing: dict[int, list[str]] = {}
    for name, tensor in state.items():
        sharing.setdefault(id(tensor), []).append(name)
    for name, tensor in state.items():
        owner = name.rpartition(".")[0]
        first, *aliases = sharing[id(tensor)]
        if owner in hidden or name != first:
            continue
        if "parametrizations." in name or "lora_" in name:
            raise ValueError(f"{name} belongs to an adapter; merge it into the weights before the export")
        module = modules[owner]
        router = part_of(owner, module) == "router" or name.endswith("e_score_correction_bias")
        linear = isinstance(module, nn.Linear) or names.is_fused(name)
        yield Entry(name, tensor, quantized.get(name), router, linear, tuple(aliases))
