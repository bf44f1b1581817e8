"""Sums over an interval from which a router's statistics follow, one row a layer, kept on the device.

    columns   load n_e (E) | unquantised model's load (E) | tokens, tokens with another top-k set, Σ H(p_t) / log E,
              tokens whose logit gradient was clipped, tokens with a logit that was held

Sums of disjoint parts of a batch add up, so one sum over ranks gives the global statistics. Padding counts nowhere.
E experts, M layers, S = 2E + 5 columns.
"""

import math

import torch
from torch import Tensor

from qdeepseek.routing.entropy import token_entropy
from qdeepseek.routing.load import differs, expert_load, load_entropy

TOKENS, CHANGED, SCORE_ENTROPY, CLIPPED, HELD = range(-5, 0)
NAMES = (
    "load_entropy_bits", "load_entropy_normalised", "unused_experts", "max_over_mean", "score_entropy",
    "topk_changed", "gradient_clipped", "logit_held",
)  # fmt: skip


def empty(layers: int, experts: int, device: torch.device) -> Tensor:
    """Sums of nothing, (M, S) fp32."""
    return torch.zeros(layers, 2 * experts + 5, device=device)


@torch.no_grad()
def add_tokens_(
    sums_S: Tensor, log_p_TE: Tensor, indices_TK: Tensor, real_T: Tensor, others_TK: Tensor | None = None
) -> None:
    """Add one layer's tokens to its row; `others_TK` are the experts that the unquantised model chose."""
    experts, real = log_p_TE.shape[1], real_T.float()
    sums_S[:experts] += expert_load(indices_TK, experts, real)
    sums_S[TOKENS] += real.sum()
    sums_S[SCORE_ENTROPY] += (token_entropy(log_p_TE).float() * real).sum() / math.log(experts)
    if others_TK is not None:
        sums_S[experts : 2 * experts] += expert_load(others_TK, experts, real)
        sums_S[CHANGED] += (differs(indices_TK, others_TK) * real).sum()


def loads(sums_MS: Tensor) -> tuple[Tensor, Tensor]:
    """Loads (M, E) of the trained and of the unquantised model."""
    experts = (sums_MS.shape[1] - 5) // 2
    return sums_MS[:, :experts], sums_MS[:, experts : 2 * experts]


def summary(sums_MS: Tensor) -> Tensor:
    """Statistics NAMES of every layer, (M, 8); `topk_changed` is NaN where no unquantised model ran.

    load_entropy_bits is that of the load, load_entropy_normalised its share of log2 E, max_over_mean 1 when even,
    score_entropy the mean H(p_t) / log E, the last three are shares of tokens.
    """
    load_ME, other_ME = loads(sums_MS)
    tokens_M = sums_MS[:, TOKENS].clamp_min(1)
    bits_M = load_entropy(load_ME)
    changed_M = torch.where(other_ME.sum(-1) > 0, sums_MS[:, CHANGED] / tokens_M, torch.nan)
    return torch.stack([
        bits_M, bits_M / math.log2(load_ME.shape[1]), (load_ME == 0).sum(-1).float(),
        load_ME.amax(-1) / load_ME.mean(-1).clamp_min(1e-30), sums_MS[:, SCORE_ENTROPY] / tokens_M,
        changed_M, sums_MS[:, CLIPPED] / tokens_M, sums_MS[:, HELD] / tokens_M,
    ], 1)  # fmt: skip
