"""Entropy regularisation of routers: experts balanced over the batch, and, if wanted, tokens confident.

    p̄_e = Σ_t p_te / T        over the tokens of the batch of all ranks that are no padding
    L   = Σ_layers [ λ·g·Σ_e p̄_e log p̄_e  +  μ·mean_t H(p_t) ]        H(p) = −Σ_e p_e log p_e, nats

Σ p̄ log p̄ lies in [−log E, 0] and is least where the experts get equal probability. The second term has the other sign:
it makes single tokens certain without touching the balance; both together maximise the mutual information of token
and expert. λ decays over the fit (`decay`), and g switches the push off in a layer whose load entropy, as a share of
log2 E, has reached `target`: a comparison on the device, made anew for every batch.
E experts, M layers, T tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qdeepseek.routing.ranks import sum_over_ranks

SCOPES = ("global", "local")
DECAYS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class EntropyConfig:
    """weight       λ
    token_weight  μ
    scope         tokens of p̄: global (the micro-batches of all ranks together) or local (this rank's)
    decay         λ over the fit: constant, or linear or cosine down to 0
    decay_until   share of the fit at which λ is 0
    target        share of the largest load entropy above which a layer is not pushed; null pushes always
    """

    weight: float = 0.02
    token_weight: float = 0.0
    scope: str = "global"
    decay: str = "constant"
    decay_until: float = 1.0
    target: float | None = None

    def __post_init__(self) -> None:
        if self.weight < 0 or self.token_weight < 0:
            raise ValueError(f"weight {self.weight} and token_weight {self.token_weight} must not be negative")
        if self.scope not in SCOPES:
            raise ValueError(f"scope {self.scope!r} is unknown; use one of {', '.join(SCOPES)}")
        if self.decay not in DECAYS:
            raise ValueError(f"decay {self.decay!r} is unknown; use one of {', '.join(DECAYS)}")
        if not 0 < self.decay_until <= 1:
            raise ValueError(f"decay_until {self.decay_until} must lie in (0, 1]")
        if self.target is not None and not 0 < self.target <= 1:
            raise ValueError(f"target {self.target} is a share of log2 E and must lie in (0, 1]; null is no target")

    def weight_at(self, progress: float) -> float:
        """λ when `progress` in [0, 1] of the fit is over."""
        t = min(1.0, progress / self.decay_until)
        if self.decay == "constant":
            return self.weight
        return self.weight * (1 - t if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * t)))


def negative_entropy(p: Tensor) -> Tensor:
    """Σ p log p in nats over the last dimension; 0 log 0 = 0 with a finite gradient."""
    return (p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1)


def token_entropy(log_p_TE: Tensor) -> Tensor:
    """H(p_t) in nats of each token, (T,)."""
    return -(log_p_TE.exp() * log_p_TE).sum(-1)


def probability_sums(log_p_TE: Tensor, real_T: Tensor) -> Tensor:
    """Σ_t p_te over the tokens that are no padding, (E,)."""
    return real_T.to(log_p_TE.dtype) @ log_p_TE.exp()


def below_target(load_ME: Tensor, target: float | None) -> Tensor:
    """g of each layer, 1 or 0 (M,): whether its load entropy is under `target` · log2 E."""
    if target is None:
        return torch.ones_like(load_ME[:, 0])
    share_ME = load_ME / load_ME.sum(-1, keepdim=True).clamp_min(1)
    return (-negative_entropy(share_ME) < target * math.log(load_ME.shape[-1])).to(load_ME.dtype)


def entropy_loss(
    log_p: Sequence[Tensor], load_ME: Tensor, real_T: Tensor, config: EntropyConfig, weight: float
) -> Tensor:
    """L of this batch, a scalar with gradient; one sum over ranks for all layers.

    Args:
        log_p: log-probabilities (T, E) of every layer.
        load_ME: tokens each expert of every layer received from this rank.
        real_T: True for tokens that are no padding.
        weight: λ now.
    """
    sums_ME = torch.stack([probability_sums(layer, real_T) for layer in log_p])
    count = real_T.sum().to(sums_ME.dtype)
    packed = torch.cat([sums_ME.flatten(), load_ME.to(sums_ME.dtype).flatten(), count[None]])
    if config.scope == "global":
        packed = sum_over_ranks(packed)
    p_ME = packed[: sums_ME.numel()].view_as(sums_ME) / packed[-1].clamp_min(1)
    push_M = below_target(packed[sums_ME.numel() : -1].view_as(sums_ME).detach(), config.target)
    loss = weight * (push_M * negative_entropy(p_ME)).sum()
    if config.token_weight:
        real = real_T.to(sums_ME.dtype)
        sure = torch.stack([(token_entropy(layer) * real).sum() for layer in log_p]).sum()
        loss = loss + config.token_weight * sure / count.clamp_min(1)
    return loss
