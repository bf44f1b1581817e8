"""Limits on the gradient that reaches a router's logits; the forward is untouched.

    held      z_te > `max_logit` and g_te < 0   ->  g_te = 0         a step against g would grow the logit further
    clipped   n·‖g_t‖ > `max_norm`              ->  g_t · max_norm / (n·‖g_t‖)

n is the number of trained tokens whose losses were averaged, so that n·g_t is the gradient of the token's own loss:
the limit then means the same for every batch size, accumulation and number of ranks. (Without n, tokens of a batch of
2048 have gradients near 1e-4 and a norm of 1 is never reached.) E experts, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LimitConfig:
    """Largest norm of a token's router-logit gradient, and the logit above which it does not grow; null: no limit."""

    max_norm: float | None = 1.0
    max_logit: float | None = 5.0

    def __post_init__(self) -> None:
        if self.max_norm is not None and self.max_norm <= 0:
            raise ValueError(f"max_norm {self.max_norm} must be positive; null is no limit")


def limit_gradient(
    grad_TE: Tensor, logits_TE: Tensor, count: Tensor | float, limit: LimitConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """The limited gradient, and two vectors (T,): 1 where a token was clipped, 1 where one of its logits was held.

    count: n, trained tokens × micro-batches of a step; a tensor stays on its device.
    """
    grad, clipped_T = grad_TE.float(), torch.zeros_like(grad_TE[:, 0], dtype=torch.float32)
    held_T = clipped_T
    if limit.max_logit is not None:
        held_TE = (logits_TE > limit.max_logit) & (grad < 0)
        grad, held_T = grad.masked_fill(held_TE, 0.0), held_TE.any(-1).float()
    if limit.max_norm is not None:
        norm_T = grad.norm(dim=-1) * count
        clipped_T = (norm_T > limit.max_norm).float()
        grad = grad * (limit.max_norm / norm_T.clamp_min(limit.max_norm))[:, None]
    return grad.to(grad_TE.dtype), clipped_T, held_T
