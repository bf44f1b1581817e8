"""Floating point operations of a token, from shapes: what throughput is measured against.

    forward     2·A + per_key·keys          A: parameters of matrices that a token meets; an expert counts top_k / E
    training    2·A + 2·A + 2·A_trained + 3·per_key·keys      forward, input gradients, gradients of trained matrices
    per_key     Σ_layers 2·heads·(d_qk + d_v)                 scores and their sum over values
    keys        keys that a token attends to: itself and what stands before it in its document

Model FLOPs in PaLM's sense (arXiv 2204.02311, appendix B), with the causal half of attention alone: neither what
gradient checkpointing computes twice, nor padding, nor what a kernel does behind the mask. Embedding look-ups, norms,
activations and fake-quantisation count nothing. With every matrix trained the weights cost the usual 6·A.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qdeepseek.data.packing import real_tokens
from qdeepseek.layers import WeightQuantizer
from qdeepseek.routing.routers import find_routers

# bf16 tensor cores, dense, FLOP/s, from the makers' data sheets (V100: fp16). A device is known by the words of its
# name; of several entries the one with the most words holds.
PEAKS = {
    "GB200": 2500e12, "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100": 989e12, "H100 PCIe": 756e12,
    "H100 NVL": 835e12, "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "A40": 150e12, "A10": 125e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12,
}  # fmt: skip


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of a token: `weights`, and `per_key` for every key that it attends to."""

    weights: float
    per_key: float

    def __add__(self, other: "TokenFlops") -> "TokenFlops":
        return TokenFlops(self.weights + other.weights, self.per_key + other.per_key)

    def of(self, tokens: float, keys: float) -> float:
        """FLOPs of `tokens` tokens that attend to `keys` keys in all."""
        return tokens * self.weights + keys * self.per_key


def active_parameters(model: PreTrainedModel) -> tuple[float, float]:
    """Matrix parameters that a token meets, and how many of them are trained; partitioned ones (ZeRO-3) count whole."""
    routers = [(int(r.top_k), int(r.num_experts)) for r in find_routers(model).values()]  # type: ignore[arg-type]
    share = routers[0][0] / routers[0][1] if routers else 1.0
    head = model.get_output_embeddings()
    lookup = {id(model.get_input_embeddings().weight)} - {id(getattr(head, "weight", None))}
    scales = {id(p) for m in model.modules() if isinstance(m, WeightQuantizer) for p in m.parameters(recurse=False)}
    active = trained = 0.0
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) < 2 or id(parameter) in lookup | scales:
            continue
        size = torch.Size(shape).numel() * (share if ".experts." in name else 1.0)
        active, trained = active + size, trained + size * parameter.requires_grad
    return active, trained


def per_key(config: Any) -> float:
    """Forward FLOPs of attention for a token and one key, all layers; MLA in its unabsorbed form, as trained."""
    heads = int(config.num_attention_heads)
    plain = getattr(config, "head_dim", None) or config.hidden_size // heads
    nope = getattr(config, "qk_nope_head_dim", None)
    score, value = (plain, plain) if nope is None else (nope + config.qk_rope_head_dim, config.v_head_dim)
    return 2.0 * config.num_hidden_layers * heads * (score + value)


def forward_flops(model: PreTrainedModel) -> TokenFlops:
    """Of a forward without gradient, such as the teacher's."""
    return TokenFlops(2 * active_parameters(model)[0], per_key(model.config))


def training_flops(model: PreTrainedModel) -> TokenFlops:
    """Of a forward and its backward."""
    active, trained = active_parameters(model)
    return TokenFlops(4 * active + 2 * trained, 3 * per_key(model.config))


def tokens_and_keys(batch: Mapping[str, Tensor]) -> Tensor:
    """(2,) int64 on the batch's device, without a sync: tokens that are no padding, and keys that they attend to."""
    real_BL, positions = real_tokens(batch), batch.get("position_ids")
    keys_BL = real_BL.cumsum(1) if positions is None else positions + 1
    return torch.stack([real_BL.sum(), (keys_BL * real_BL).sum()])


def peak_flops(device: torch.device) -> float | None:
    """Of one device by its name; None for a CPU and for a device that the table does not have."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """`NVIDIA A100-SXM4-80GB` -> 312e12; None for a name that no entry fits."""
    words = set(name.replace("-", " ").split())
    known = [entry for entry in PEAKS if words.issuperset(entry.split())]
    return PEAKS[max(known, key=lambda entry: len(entry.split()))] if known else None
