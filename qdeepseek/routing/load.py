"""How evenly a router spreads its tokens, and whether it sends them where another router does.

With n_e the tokens expert e received and f_e = n_e / Σn: load entropy H = −Σ f_e log2 f_e (bits; log2 E when
even), dead experts #{n_e = 0}, maximal violation max n_e / mean n_e − 1 (arXiv 2408.15664).
E experts, T tokens, K top-k.
"""

import torch
from torch import Tensor


def expert_load(indices_TK: Tensor, experts: int, real_T: Tensor | None = None) -> Tensor:
    """Tokens each expert received, (E,) fp32, from the chosen experts (T, K). No sync, no scatter races.

    real_T: 1 for tokens that count, 0 for padding; None counts all.
    """
    one_hot = torch.zeros(experts, device=indices_TK.device, dtype=torch.float32)
    ones_TK = torch.ones_like(indices_TK, dtype=torch.float32)
    if real_T is not None:
        ones_TK = ones_TK * real_T[:, None]
    return one_hot.index_add_(0, indices_TK.reshape(-1), ones_TK.reshape(-1))


def load_entropy(load_E: Tensor) -> Tensor:
    """Entropy of the load in bits, reduced over the last dimension."""
    f = load_E / load_E.sum(-1, keepdim=True).clamp_min(1)
    return -(f * f.clamp_min(1e-30).log2()).sum(-1)


def max_violation(load_E: Tensor) -> Tensor:
    """max n_e / mean n_e − 1 over the last dimension: 0 when even, E − 1 when one expert takes all."""
    return load_E.amax(-1) / load_E.mean(-1).clamp_min(1e-30) - 1


def differs(indices_TK: Tensor, others_TK: Tensor) -> Tensor:
    """True (T,) for the tokens whose set of experts is another one; the order within a set does not matter."""
    return (indices_TK.sort(-1).values != others_TK.sort(-1).values).any(-1)
