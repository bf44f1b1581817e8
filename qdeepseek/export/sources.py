"""Where the exporter takes weights and scales from: the prepared model's memory, or files, a tensor at a time.

Both answer the same two questions for one 2-D weight, an ordinary one or one expert of a fused parameter:

    weight(parameter, expert)                 the trained, unquantised weight
    quantizer(tensor, expert, weight)         a WeightQuantizer whose quantize(weight) gives what the forward used

An expert's quantiser is the fused one's with its state cut to that expert, so no more than one expert is ever
expanded to fp32; scales never mix experts, hence the codes are the same.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from qdeepseek.export import names, safetensors_file
from qdeepseek.export.checkpoint import Checkpoint
from qdeepseek.export.names import Layout
from qdeepseek.layers import WeightQuantizer
from qdeepseek.surgery import QuantizedTensor, quantized_tensors

STATE = ("scale", "zero", "clip_ratio", "clip_ratio_low")
SCHEMES_KEY = "qdeepseek_schemes"


class SchemeMismatch(ValueError):
    """An export was asked for in another scheme than the one that was trained."""


class Source(Protocol):
    def weight(self, parameter: str, expert: int | None = None) -> Tensor: ...
    def quantizer(self, tensor: QuantizedTensor, expert: int | None, weight_OI: Tensor) -> WeightQuantizer: ...


class ModelSource:
    """Weights and quantisers of a prepared model in memory."""

    def __init__(self, model: nn.Module):
        self._state = model.state_dict(keep_vars=True)

    def weight(self, parameter: str, expert: int | None = None) -> Tensor:
        tensor = self._state[parameter].detach()
        if tensor.is_meta or not tensor.numel():
            raise ValueError(
                f"{parameter} has no data (shape {tuple(tensor.shape)}, {tensor.device}); gather the weights of a "
                "sharded model, or give the folder they are in as `weights`"
            )
        return tensor if expert is None else tensor[expert]

    def quantizer(self, tensor: QuantizedTensor, expert: int | None, weight_OI: Tensor) -> WeightQuantizer:
        state = {key: getattr(tensor.quantizer, key) for key in STATE}
        return slice_quantizer(tensor, expert, weight_OI, {k: v for k, v in state.items() if v is not None})


class FolderSource:
    """Weights of a checkpoint folder with the names of the original checkpoint, and quantiser state of a file.

    weights     folder in the dtype of training, per-expert tensors as `save_pretrained` writes them
    quantizers  file of `save_quantizers`; None: learned and searched scales start from the weights (RTN)
    dequantized dtype that FP8 weights of the folder come in
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        weights: Path,
        quantizers: Path | None = None,
        dequantized: torch.dtype = torch.bfloat16,
    ):
        self.checkpoint = Checkpoint(weights)
        self._layout, self._dequantized = layout, dequantized
        self._state = None if quantizers is None else Checkpoint(quantizers)
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        head, embedding = _tied_names(model)
        self._alias = {head: embedding} if head and head not in self.checkpoint else {}
        if quantizers is not None:
            check_schemes(model, json.loads(safetensors_file.read_metadata(quantizers).get(SCHEMES_KEY, "{}")))

    def weight(self, parameter: str, expert: int | None = None) -> Tensor:
        parts = [self.checkpoint.read(name, self._dequantized) for name in self.stored_names(parameter, expert)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def stored_names(self, parameter: str, expert: int | None = None) -> list[str]:
        """The tensors of the folder that `weight` joins along the rows."""
        if expert is None:
            return [names.to_checkpoint(self._alias.get(parameter, parameter), self._layout)]
        modules = (names.expert_module(parameter, expert, part, self._layout) for part in names.parts_of(parameter))
        return [f"{module}.weight" for module in modules]

    def quantizer(self, tensor: QuantizedTensor, expert: int | None, weight_OI: Tensor) -> WeightQuantizer:
        return slice_quantizer(tensor, expert, weight_OI, self._read_state(tensor.name))

    def _read_state(self, parameter: str) -> dict[str, Tensor]:
        if self._last[0] != parameter:
            prefix = state_prefix(parameter)
            found = {}
            if self._state is not None:
                found = {k: self._state.read(prefix + k) for k in STATE if prefix + k in self._state}
            self._last = (parameter, found)
        return self._last[1]


def slice_quantizer(
    tensor: QuantizedTensor, expert: int | None, weight_OI: Tensor, state: Mapping[str, Tensor]
) -> WeightQuantizer:
    """A quantiser for one 2-D weight with the state of `tensor`'s, cut to one expert.

    Without state, learned scales and clip ratios are found from the weight.
    """
    own = {key: value.detach() if expert is None else value.detach()[expert] for key, value in state.items()}
    return quantizer_with(tensor, expert, weight_OI, own)


def quantizer_with(
    tensor: QuantizedTensor, expert: int | None, weight_OI: Tensor, state: Mapping[str, Tensor]
) -> WeightQuantizer:
    """A quantiser for one 2-D weight with this state, that of the one expert where there are several."""
    blocks = len(names.parts_of(tensor.name)) if expert is not None else 1
    quantizer = WeightQuantizer(
        tensor.scheme, tensor.quantizer.method, weight_OI.shape, row_blocks=blocks, device=weight_OI.device,
        name=tensor.name,
    )  # fmt: skip
    if not state:
        quantizer.initialize(weight_OI)
        return quantizer
    for key, value in state.items():
        if tuple(value.shape) != quantizer.scale_shape:
            raise SchemeMismatch(
                f"{tensor.name}: its {key} has shape {tuple(value.shape)}, the scheme {tensor.scheme} wants "
                f"{quantizer.scale_shape}; export with the recipe of the training run"
            )
        present = getattr(quantizer, key)
        if isinstance(present, nn.Parameter):
            present.data = value
        else:
            setattr(quantizer, key, value)
    return quantizer


def save_quantizers(model: nn.Module, path: Path) -> None:
    """Writes scales, zero points and clip ratios of a prepared model, with the schemes they were trained for."""
    tensors, schemes = {}, {}
    for tensor in quantized_tensors(model):
        schemes[tensor.name] = scheme_entry(tensor)
        for key in STATE:
            value = getattr(tensor.quantizer, key)
            if value is not None:
                tensors[state_prefix(tensor.name) + key] = value
    safetensors_file.write(path, tensors, {SCHEMES_KEY: json.dumps(schemes)})


def scheme_entry(tensor: QuantizedTensor) -> dict:
    """What a runtime must know about a quantised tensor, as JSON."""
    return {"weight": tensor.scheme.to_dict(), "input": tensor.input.to_dict() if tensor.input else None}


def check_schemes(model: nn.Module, trained: Mapping[str, dict]) -> None:
    """Raises SchemeMismatch unless the prepared model has exactly the trained schemes (parameter -> entry)."""
    asked = {tensor.name: scheme_entry(tensor) for tensor in quantized_tensors(model)}
    for name in dict.fromkeys([*trained, *asked]):
        if trained.get(name) != asked.get(name):
            raise SchemeMismatch(
                f"{name} was trained as {_describe(trained.get(name))} and would be exported as "
                f"{_describe(asked.get(name))}; export with the recipe of the training run, or train this one"
            )


def state_prefix(parameter: str) -> str:
    """Prefix of a quantiser's state in the state dict of a prepared model."""
    module, _, key = parameter.rpartition(".")
    return f"{module}.{'weight' if key == 'weight' else key}_quantizer."


def _describe(entry: dict | None) -> str:
    if entry is None:
        return "unquantised"
    return f"weight {entry['weight']}, input {entry['input']}"


def _tied_names(model: nn.Module) -> tuple[str, str]:
    """Parameter names of lm_head and input embedding, for a folder that holds a tied pair once."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    by_module = {id(module): name for name, module in model.named_modules()}
    found = [f"{by_module[id(m)]}.weight" if m is not None and id(m) in by_module else "" for m in (head, embedding)]
    return found[0], found[1]
