"""Routed experts with fused weights gate_up_proj (E, 2I, H) = [gate; up], down_proj (E, H, I), fake-quantised.

    y_t = sum over the chosen experts e of  p_te * D_e q'(act(G_e x) * (U_e x)),   x = q(x_t)
G, U, D being the quantised gate, up and down and q, q' the input quantisers, if any.  The matmuls are those of
transformers (grouped_mm, batched_mm): its functions take the module as `self`, and get a view of it whose weights
are the quantised ones and whose `_apply_gate` also quantises its result.  `naive_experts_forward` is the same as a
loop over experts: eager mode, and the reference.

surgery passes the stock functions in and registers the results in ALL_EXPERTS_FUNCTIONS; this file knows no
transformers.  A module without quantisers behaves as stock.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qdeepseek.layers.activation_quantizer import ActivationQuantizer
from qdeepseek.layers.rematerialise import rematerialise
from qdeepseek.layers.weight_quantizer import WeightQuantizer

ExpertsForward = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]

QUANTIZERS = ("gate_up_proj_quantizer", "down_proj_quantizer", "input_quantizer", "down_input_quantizer")


def attach_expert_quantizers(
    experts: nn.Module,
    gate_up: WeightQuantizer,
    down: WeightQuantizer,
    input: ActivationQuantizer | None = None,
    down_input: ActivationQuantizer | None = None,
) -> None:
    """Add the quantisers as submodules of a fused experts module; its Parameters stay where they are.

    Raises ValueError when the weights are not (E, out, in) under the names gate_up_proj and down_proj.
    """
    missing = [name for name in ("gate_up_proj", "down_proj") if not hasattr(experts, name)]
    odd = getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True)
    if missing or odd:
        why = f"has no {missing}" if missing else "stores its weights as (E, in, out) or interleaves gate and up"
        raise ValueError(
            f"{type(experts).__name__} {why}; only fused [gate; up] experts of shape (E, out, in) can be "
            "quantised: keep this module in bf16 with a rule in conf/quant"
        )
    for name, quantizer in zip(QUANTIZERS, (gate_up, down, input, down_input), strict=True):
        experts.add_module(name, quantizer)


def detach_expert_quantizers(experts: nn.Module) -> None:
    """Undo `attach_expert_quantizers`."""
    for name in QUANTIZERS:
        experts._modules.pop(name, None)


def has_expert_quantizers(experts: nn.Module) -> bool:
    return experts._modules.get(QUANTIZERS[0]) is not None


class _QuantizedView:
    """The experts module as a stock function should see it; everything not named here is the module's own."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        gate_up, down = experts.gate_up_proj, experts.down_proj
        self.gate_up_proj: Tensor = experts.gate_up_proj_quantizer(gate_up)
        self.down_proj: Tensor = experts.down_proj_quantizer(down)
        self.triples = (
            (experts.gate_up_proj_quantizer, gate_up, self.gate_up_proj),
            (experts.down_proj_quantizer, down, self.down_proj),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def quantize_input(self, hidden_states: Tensor) -> Tensor:
        quantizer = self._experts.input_quantizer
        return hidden_states if quantizer is None else quantizer(hidden_states)

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        """(S, 2I) -> (S, I): the module's own gating, then the quantiser of down_proj's input."""
        hidden = self._experts._apply_gate(gate_up_out)
        quantizer = self._experts.down_input_quantizer
        return hidden if quantizer is None else quantizer(hidden)


def quant_experts_forward(stock: Callable[..., Tensor]) -> ExpertsForward:
    """Wrap a stock experts function (`grouped_mm_experts_forward`, ...) to compute on quantised tensors.

    Each token's input is quantised once, before it is copied to its top-k experts.
    """

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not has_expert_quantizers(self):
            return stock(self, hidden_states, top_k_index, top_k_weights)
        view = _QuantizedView(self)
        hidden_states = view.quantize_input(hidden_states)
        with rematerialise(*view.triples):
            return stock(view, hidden_states, top_k_index, top_k_weights)

    forward.__name__ = f"quantized_{getattr(stock, '__name__', 'experts_forward')}"
    return forward


def naive_experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """One expert after another. hidden_states (T, H), top_k_index and top_k_weights (T, K) -> (T, H)."""
    if not has_expert_quantizers(self):
        return inspect.unwrap(type(self).forward)(self, hidden_states, top_k_index, top_k_weights)
    view = _QuantizedView(self)
    x_TH = view.quantize_input(hidden_states)
    bias = view.has_bias if hasattr(self, "has_bias") else False
    output_TH = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        if expert >= view.num_experts:  # expert-parallel sentinel: another rank's token
            continue
        slot, token = torch.where(top_k_index.t() == expert)  # transformers' own order: sums are equal bit for bit
        gate_up = F.linear(x_TH[token], view.gate_up_proj[expert], view.gate_up_proj_bias[expert] if bias else None)
        hidden = view._apply_gate(gate_up)
        out = F.linear(hidden, view.down_proj[expert], view.down_proj_bias[expert] if bias else None)
        if getattr(self, "has_post_expert_norm", False):
            out = view.post_expert_norm(out)
        out = out * top_k_weights[token, slot, None]
        output_TH.index_add_(0, token, out.to(output_TH.dtype))
    return output_TH
