"""GPTQ of a prepared model in one forward pass: every layer is quantised at the moment its inputs arrive.

All calibration sequences run through the model as one batch. Before a quantised Linear (or fused experts) computes,
a hook turns its input X into H = XᵀX / T, quantises the weight under H (`gptq_core`) and lets the forward go on with
the result. So X is always what the layer will see in service: the output of layers already quantised, through the
layer's own activation quantiser. Each routed expert has its own H, from the tokens the router sent to it; the H of
its down_proj is built from its own, quantised, gate_up_proj. An expert with fewer than `min_tokens` tokens is
calibrated on all tokens of the layer instead, and the report says so.

Memory: weights + one activation of the whole calibration set (tokens × widest layer). 64 × 256 tokens are plenty for
the shipped model, 128 × 2048 usual for large ones.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qdeepseek.ptq.gptq_core import GPTQConfig, gptq_quantize, output_error
from qdeepseek.quant.grid import dequantize
from qdeepseek.quant.scheme import QuantScheme, RangeMethod
from qdeepseek.surgery.prepare import QuantizedTensor, quantized_tensors

log = logging.getLogger(__name__)

_CHUNK_TOKENS = 8192
_CHUNK_HESSIAN = 2**28  # elements of the experts' Hessians held at once


@dataclass(frozen=True)
class TensorReport:
    """What GPTQ did to one weight.

    tokens           calibration tokens behind H (for experts: of the least used one)
    error            ‖X(W - Ŵ)ᵀ‖² / ‖XWᵀ‖² of GPTQ on the calibration tokens, mean over experts
    rtn_error        the same for rounding to nearest
    starved_experts  experts that saw too few tokens and were calibrated on all tokens of the layer
    """

    name: str
    tokens: int
    error: float
    rtn_error: float
    starved_experts: tuple[int, ...] = ()


@dataclass(frozen=True)
class GPTQReport:
    """One row for each quantised weight, and the weights that no calibration token reached (rounded to nearest)."""

    tensors: tuple[TensorReport, ...]
    rounded: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Finished(Exception):
    """Every weight is quantised: the rest of the forward is not needed."""


def default_range(scheme: QuantScheme) -> RangeMethod:
    """The MSE search from 3 bits on, min-max at 2, where a clipped range leaves no room for the corrections.

    KL on the select part, shipped model, min-max against MSE: W4 g128 .0082, .0074; W4 g32 .0059, .0058; W3 g32 .0264,
    .0250; W2 g32 .186, .250.
    """
    return RangeMethod("mse" if scheme.bits >= 3 else "minmax")


@torch.no_grad()
def gptq(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    config: GPTQConfig | None = None,
    *,
    method: RangeMethod | None = None,
    min_tokens: int = 128,
) -> GPTQReport:
    """Quantises every Linear and fused experts of a prepared model by GPTQ, in place.

    Weights become their dequantised values and quantisers keep the scales (`set_scale`), so that
    `quantizer.quantize(weight)` returns GPTQ's codes. Weights without inputs (embeddings) are rounded to nearest.
    method: how scales are found, whatever the recipe trains with; None is `default_range` of each scheme.
    batches: model inputs of one sequence length, full windows without padding; `labels` are ignored.
    Raises ValueError for a model that is not prepared, no batches, or batches that cannot be joined.
    """
    waiting: dict[str, list[QuantizedTensor]] = {}
    for tensor in quantized_tensors(model):
        waiting.setdefault(tensor.module_name, []).append(tensor)
    if not waiting:
        raise ValueError("gptq: the model has no quantised weights; call prepare(model, recipe) first")
    inputs = _join(batches)
    rows: list[TensorReport] = []
    expected = {name for name, tensors in waiting.items() if not isinstance(tensors[0].module, nn.Embedding)}

    def arrive(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in expected:  # a module that the model calls twice keeps its first result
                return
            if len(waiting[name]) == 2:
                rows.extend(_quantize_experts(waiting[name], config, method, min_tokens, *args, **kwargs))
            else:
                rows.append(_quantize_linear(waiting[name][0], config, method, *args, **kwargs))
            expected.remove(name)
            if not expected:
                raise _Finished

        return hook

    handles = [waiting[n][0].module.register_forward_pre_hook(arrive(n), with_kwargs=True) for n in expected]
    training = model.training
    try:
        model.eval()(**inputs, use_cache=False)
    except _Finished:
        pass
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    done = {row.name for row in rows}
    rounded = tuple(t.name for tensors in waiting.values() for t in tensors if t.name not in done)
    if rounded:
        log.warning("gptq: rounded to nearest, since no calibration token reached them: %s", ", ".join(rounded))
    return GPTQReport(tuple(rows), rounded)


def _join(batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All batches as one, without labels."""
    collected = [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]
    if not collected:
        raise ValueError("gptq: no calibration batches; give some hundred windows of training text")
    shapes = {tuple((k, tuple(v.shape[1:])) for k, v in sorted(batch.items())) for batch in collected}
    if len(shapes) > 1:
        raise ValueError(
            f"gptq: calibration batches of different keys or lengths cannot be joined: {sorted(shapes)}; "
            "cut them to windows of one length"
        )
    return {key: torch.cat([batch[key] for batch in collected]) for key in collected[0]}


def _hessian(x_TI: Tensor) -> Tensor:
    """XᵀX / T in float32 (float64 for float64 input)."""
    dtype = torch.promote_types(x_TI.dtype, torch.float32)
    hessian = torch.zeros(x_TI.shape[-1], x_TI.shape[-1], dtype=dtype, device=x_TI.device)
    for chunk in x_TI.split(_CHUNK_TOKENS):
        chunk = chunk.to(dtype)
        hessian.addmm_(chunk.mT, chunk, alpha=1 / x_TI.shape[0])
    return hessian


def _settle(
    tensor: QuantizedTensor, inputs: Sequence[Tensor], config: GPTQConfig | None, method: RangeMethod | None
) -> tuple[float, float]:
    """Quantises a weight for its inputs (one (T, I) a matrix) and writes it back; (error, error of rounding)."""
    weight, quantizer, scheme = tensor.weight, tensor.quantizer, tensor.scheme
    rounded = dequantize(*quantizer.quantize(weight), scheme, weight.dtype)
    fused = weight.dim() == 3
    count = max(1, _CHUNK_HESSIAN // weight.shape[-1] ** 2) if fused else len(weight)
    parts, errors = [], torch.zeros(2)
    for i, w in enumerate(weight.split(count)):
        hessians = [_hessian(x) for x in inputs[i * count : i * count + len(w)]] if fused else [_hessian(inputs[0])]
        hessian = torch.stack(hessians) if fused else hessians[0]
        shape = (len(w), *quantizer.scale_shape[1:]) if fused else quantizer.scale_shape
        found = method or default_range(scheme)
        part = gptq_quantize(w, hessian, scheme, found, config, scale_shape=shape, name=tensor.name)
        w_hat = dequantize(*part, scheme, weight.dtype)
        for k, candidate in enumerate((w_hat, rounded[i * count : i * count + len(w)])):
            errors[k] += output_error(w, candidate, hessian).sum().item() / len(inputs)
        parts.append(part)
    codes, scale = (torch.cat([part[k] for part in parts]) for k in (0, 1))  # type: ignore[misc]
    zero = None if scheme.symmetric else torch.cat([part[2] for part in parts])  # type: ignore[misc]
    weight.copy_(dequantize(codes, scale, zero, scheme, weight.dtype))
    quantizer.set_scale(scale, zero)
    if not torch.equal(quantizer.quantize(weight)[0], codes):
        log.warning(
            "gptq: %s: %s cannot hold every code of %d bits; some move by one step",
            tensor.name, weight.dtype, scheme.bits,
        )  # fmt: skip
    return errors[0].item(), errors[1].item()


def _quantize_linear(
    tensor: QuantizedTensor, config: GPTQConfig | None, method: RangeMethod | None, input: Tensor
) -> TensorReport:
    module: Any = tensor.module
    x_TI = (input if module.input_quantizer is None else module.input_quantizer(input)).flatten(0, -2)
    return TensorReport(tensor.name, len(x_TI), *_settle(tensor, [x_TI], config, method))


def _quantize_experts(
    tensors: list[QuantizedTensor],
    config: GPTQConfig | None,
    method: RangeMethod | None,
    min_tokens: int,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> list[TensorReport]:
    """gate_up_proj under its experts' inputs, then down_proj under what the quantised gate_up_proj sends it."""
    gate_up, down = tensors
    experts: Any = gate_up.module
    x_TH = hidden_states if experts.input_quantizer is None else experts.input_quantizer(hidden_states)
    routed = [torch.where((top_k_index == e).any(-1))[0] for e in range(gate_up.weight.shape[0])]
    starved = tuple(e for e, tokens in enumerate(routed) if len(tokens) < min_tokens)
    if starved:
        log.info("gptq: %s: experts %s saw under %d tokens, calibrated on all %d of the layer",
                 gate_up.module_name, list(starved), min_tokens, len(x_TH))  # fmt: skip
    inputs = [x_TH if e in starved else x_TH[tokens] for e, tokens in enumerate(routed)]
    least = min(len(x) for x in inputs)
    first = _settle(gate_up, inputs, config, method)
    second = _settle(down, [_hidden(experts, gate_up.weight, e, x) for e, x in enumerate(inputs)], config, method)
    return [TensorReport(t.name, least, *e, starved) for t, e in ((gate_up, first), (down, second))]


def _hidden(experts: Any, gate_up: Tensor, e: int, x: Tensor) -> Tensor:
    """The input of expert e's down_proj, through its activation quantiser."""
    bias = experts.gate_up_proj_bias[e] if getattr(experts, "has_bias", False) else None
    hidden = experts._apply_gate(F.linear(x, gate_up[e], bias))
    return hidden if experts.down_input_quantizer is None else experts.down_input_quantizer(hidden)
