"""Routed experts with fused weights gate_up_proj (E, 2I, H) = [gate; up], down_proj (E, H, I), fake-quantised.

    y_t = sum over the chosen experts e of  p_te * D_e q'(act(G_e x) * (U_e x)),   x = q(x_t)
G, U, D being the quantised gate, up and down and q, q' the input quantisers, if any.  The matmuls are those of
transformers (grouped_mm, batched_mm): its functions take the module as `self`, and get a view of it whose weights
are the quantised ones and whose `_apply_gate` also quantises its result.  `naive_experts_forward` is the same as a
loop over experts: eager mode, and the reference.

Gradients inside are reached by taps (`tap_experts`): functions of what gate_up_proj returned and of what down_proj
gets, with the expert of every row, since grouped_mm sorts rows by expert, batched_mm keeps them by token, and the loop
has one expert at a time.

Under autocast weights are cast for the product, quantised or not (autocast.py). Tokens stay as they come until
transformers casts the gathered rows to the weights' dtype, so that their gradients add up over the top-k experts in
fp32, and the output has the dtype of the tokens: both as autocast leaves it in the loop of F.linear.

surgery passes the stock functions in and registers the results in ALL_EXPERTS_FUNCTIONS; this file knows no
transformers.  A module without quantisers behaves as stock.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qdeepseek.layers.activation_quantizer import ActivationQuantizer
from qdeepseek.layers.autocast import as_autocast
from qdeepseek.layers.rematerialise import rematerialise
from qdeepseek.layers.weight_quantizer import WeightQuantizer

ExpertsForward = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]

# (rows (S, C), expert of every row (S,) int64, >= the number of experts for another rank's row) -> rows (S, C)
Tap = Callable[[Tensor, Tensor], Tensor]

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
    tap_experts(experts)
    for name in QUANTIZERS:
        experts._modules.pop(name, None)


def has_expert_quantizers(experts: nn.Module) -> bool:
    return experts._modules.get(QUANTIZERS[0]) is not None


def tap_experts(experts: nn.Module, gate_up: Tap | None = None, down_input: Tap | None = None) -> None:
    """Let `gate_up` pass on what gate_up_proj returned (S, 2I) and `down_input` what enters down_proj (S, I), before
    its quantiser. None and None takes the taps away. They act in a module with quantisers, in every implementation.

    Raises ValueError for a module without quantisers: stock functions do not call taps.
    """
    if gate_up is None and down_input is None:
        experts.__dict__.pop("taps", None)
        return
    if not has_expert_quantizers(experts):
        raise ValueError(
            f"tap_experts: {type(experts).__name__} has no quantisers, so transformers' own function runs and calls no "
            "tap; quantise the experts by a rule in conf/quant"
        )
    experts.__dict__["taps"] = (gate_up, down_input)


class _AutocastView:
    """An experts module without quantisers, its weights and biases as a product under autocast takes them."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return as_autocast(value) if isinstance(value, Tensor) else value


class _QuantizedView:
    """The experts module as a stock function should see it; everything not named here is the module's own."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self._gate_up_tap, self._down_input_tap = experts.__dict__.get("taps", (None, None))
        self.row_expert_S: Tensor | None = None  # for the taps
        gate_up, down = experts.gate_up_proj, experts.down_proj
        self.gate_up_proj = as_autocast(experts.gate_up_proj_quantizer(gate_up))
        self.down_proj = as_autocast(experts.down_proj_quantizer(down))
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
        """(S, 2I) -> (S, I): taps around the module's own gating, then the quantiser of down_proj's input."""
        if self._gate_up_tap is not None:
            gate_up_out = self._gate_up_tap(gate_up_out, self.row_expert_S)
        hidden = self._experts._apply_gate(gate_up_out)
        if self._down_input_tap is not None:
            hidden = self._down_input_tap(hidden, self.row_expert_S)
        quantizer = self._experts.down_input_quantizer
        return hidden if quantizer is None else quantizer(hidden)


def quant_experts_forward(
    stock: Callable[..., Tensor], row_order: Literal["expert", "token"] | None = None
) -> ExpertsForward:
    """Wrap a stock experts function (`grouped_mm_experts_forward`, ...) to compute on quantised tensors.

    Each token's input is quantised once, before it is copied to its top-k experts.

    row_order: how `stock` orders the T * K rows: sorted by `expert`, or by `token` as in top_k_index. Taps need it.
    """

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not has_expert_quantizers(self):
            return stock(_AutocastView(self), hidden_states, top_k_index, top_k_weights)
        view = _QuantizedView(self)
        if "taps" in self.__dict__:
            if row_order is None:
                raise ValueError(f"{stock} is wrapped without its row_order, which taps need; give expert or token")
            flat = top_k_index.reshape(-1)
            view.row_expert_S = flat.sort().values if row_order == "expert" else flat
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
        view.row_expert_S = torch.full_like(token, expert)
        hidden = view._apply_gate(gate_up)
        out = F.linear(hidden, view.down_proj[expert], view.down_proj_bias[expert] if bias else None)
        if getattr(self, "has_post_expert_norm", False):
            out = view.post_expert_norm(out)
        out = out * top_k_weights[token, slot, None]
        output_TH.index_add_(0, token, out.to(output_TH.dtype))
    return output_TH
