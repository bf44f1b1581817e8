"""Adaptive router temperature τ, folded into the router's weight so that the served router is the trained one.

    log τ ← clamp(log τ + u·sign(target − H̄), ± log τ_max)        H̄ = mean_t H(p_t) / log E
    W     ← W · τ_before / τ_after                                 z = W h, hence z / τ without a division

Tokens that are too certain of their experts (H̄ under the target) raise τ, undecided ones lower it. No temperature
exists outside the weight: the forward, the checkpoint and every export format stay as they are. Adam's moments are not
rescaled. E experts, M layers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TemperatureConfig:
    """Target of the mean score entropy as a share of log E, step u of log τ, and the bound τ_max."""

    target: float
    speed: float = 1e-3
    largest: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ValueError(f"target {self.target} is a share of log E and must lie in (0, 1)")
        if self.speed <= 0 or self.largest <= 1:
            raise ValueError(f"speed {self.speed} must be positive and largest {self.largest} above 1")


def adapt(log_tau_M: Tensor, entropy_M: Tensor, config: TemperatureConfig) -> Tensor:
    """log τ of every layer after one step; `entropy_M` is H̄."""
    bound = math.log(config.largest)
    return (log_tau_M + config.speed * (config.target - entropy_M).sign()).clamp(-bound, bound)


@torch.no_grad()
def fold_(weight_EH: Tensor, log_tau_before: Tensor, log_tau_after: Tensor) -> None:
    """In-place W · τ_before / τ_after."""
    weight_EH.mul_((log_tau_before - log_tau_after).exp().to(weight_EH.dtype))
