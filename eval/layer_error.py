"""Where in the network the error sits, layer by layer, against the unquantised fine-tuned model.

    weights   ‖ŵ − w‖ / ‖w‖        ŵ as served (after fake-quant where a quantiser is in place)
    hidden    ‖h_l − h_l^ref‖ / ‖h_l^ref‖   of the attention output, the MLP or MoE output, and the residual
                                      stream after layer l, over the tokens of a few batches (Frobenius norms)

A QAT model's weights have moved away from the reference on purpose; its hidden states should have moved back.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval.error_map import ErrorMap
from eval.token_metrics import hidden_states, inference
from qdeepseek.surgery import quantized_tensors

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
HIDDEN_PARTS = {"self_attn": "attention", "mlp": "MLP", "": "residual"}


def served_weights(model: nn.Module) -> dict[str, tuple[Tensor, nn.Module | None]]:
    """Parameter name -> (weight, its quantiser or None) for the matrices of a prepared or plain model."""
    found: dict[str, tuple[Tensor, nn.Module | None]] = {
        name: (p, None) for name, p in model.named_parameters() if p.ndim >= 2
    }
    for tensor in quantized_tensors(model):
        found[tensor.name] = (tensor.weight, tensor.quantizer)
    return found


def relative_error(w_hat: Tensor, w: Tensor) -> float:
    """‖ŵ − w‖ / ‖w‖ with fp64 sums, one slice of the first dimension at a time for 3-D weights; 0 / 0 = 0."""
    slices = zip(w_hat, w) if w.ndim == 3 else [(w_hat, w)]
    error = norm = 0.0
    for a, b in slices:
        b32 = b.detach().float()
        error += float((a.detach().to(b.device).float() - b32).square().sum(dtype=torch.float64))
        norm += float(b32.square().sum(dtype=torch.float64))
    return math.sqrt(error / norm) if norm else 0.0 if not error else math.inf


def weight_error(model: nn.Module, reference: nn.Module, names: Collection[str] | None = None) -> ErrorMap:
    """Relative weight error of every matrix in a layer that both models have under the same name.

    `names` restricts it to these parameters, usually the quantised ones; None takes the quantised ones of a
    prepared model, and every matrix of a plain one.
    """
    served, original = served_weights(model), dict(reference.named_parameters())
    if names is None:
        quantized = [name for name, (_, quantizer) in served.items() if quantizer is not None]
        names = quantized or list(served)
    cells: dict[tuple[int, str], float] = {}
    with torch.no_grad():
        for name, (weight, quantizer) in served.items():
            match = _LAYER.search(name)
            if match and name in names and name in original:
                part = match[2].removesuffix(".weight").removeprefix("self_attn.").removeprefix("mlp.")
                w_hat = weight if quantizer is None else quantizer(weight)
                cells[int(match[1]), part] = relative_error(w_hat, original[name])
    return ErrorMap.from_cells(cells)


def layer_points(model: nn.Module) -> dict[tuple[int, str], nn.Module]:
    """(layer, part) -> the module whose output is compared."""
    points = {}
    for name, module in model.named_modules():
        match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.(self_attn|mlp))?$", name)
        if match:
            points[int(match[1]), HIDDEN_PARTS[match[2] or ""]] = module
    return points


def record(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[tuple[int, str], Tensor]:
    """Outputs (B, L, H) of all layer points in one forward pass."""
    outputs: dict[tuple[int, str], Tensor] = {}
    handles = []
    for key, module in layer_points(model).items():

        def keep(_module: nn.Module, _args: Any, output: Any, key: tuple[int, str] = key) -> None:
            outputs[key] = output[0] if isinstance(output, tuple) else output

        handles.append(module.register_forward_hook(keep))
    try:
        hidden_states(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def hidden_error(
    models: Mapping[str, PreTrainedModel],
    reference: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
) -> dict[str, ErrorMap]:
    """Relative error of hidden states of every model, on the same `batches` (a few are enough)."""
    sums: dict[str, dict[tuple[int, str], float]] = {name: {} for name in models}
    norms: dict[tuple[int, str], float] = {}
    with inference([*models.values(), reference]):
        for batch in batches:
            expected = record(reference, batch)
            for key, h in expected.items():
                norms[key] = norms.get(key, 0.0) + float(h.float().square().sum(dtype=torch.float64))
            for name, model in models.items():
                for key, h in record(model, batch).items():
                    error = (h.to(expected[key].device).float() - expected[key].float()).square()
                    sums[name][key] = sums[name].get(key, 0.0) + float(error.sum(dtype=torch.float64))
    order = sorted(norms, key=lambda key: (key[0], list(HIDDEN_PARTS.values()).index(key[1])))
    return {
        name: ErrorMap.from_cells({key: math.sqrt(error[key] / max(norms[key], 1e-300)) for key in order})
        for name, error in sums.items()
    }
