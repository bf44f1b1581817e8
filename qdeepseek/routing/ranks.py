"""Sums over all ranks, with gradient where it is needed.

DDP averages the gradients of W ranks. A loss of S = Σ_r s_r is the same number L(S) on every rank, and

    mean_r dL/dθ_r = Σ_r (∂L/∂S)(∂s_r/∂θ)        needs        ∂L/∂s_r = W · ∂L/∂S        on each of them,

so the backward is a multiplication and needs no communication.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def ranks() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """Σ_r x_r, the same on every rank; its gradient is exact for a loss that every rank computes from it and whose
    parameter gradients are averaged. One rank: `x` itself."""
    return x if ranks() == 1 else _Sum.apply(x)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ranks()
