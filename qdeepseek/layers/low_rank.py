"""W + s·B·A, the weight that a low-rank adapter (LoRA, arXiv 2106.09685) makes of W, for a Linear and for experts.

    w'_OI  = w_OI  + s · b_OR a_RI                      w'_EOI = w_EOI + s · b_EOR a_ERI

One multiply-add (`addmm`, `baddbmm`), rounded once to the dtype of W, never under autocast. Training and merging call
this one function, hence they agree in every bit: `W + s·(B @ A)` written in two steps rounds differently, and a weight
that moves by one unit in the last place can land on another INT4 code. A and B may be fp32 beside a bf16 W.

E experts, O out, I in, R rank.
"""

import torch
from torch import Tensor


def add_low_rank(w: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """w (O, I) with a (R, I), b (O, R), or w (E, O, I) with a (E, R, I), b (E, O, R) -> w' like w, in its dtype."""
    multiply_add = torch.addmm if w.ndim == 2 else torch.baddbmm
    with torch.autocast(w.device.type, enabled=False):
        return multiply_add(w, b.to(w.dtype), a.to(w.dtype), alpha=scaling)


def low_rank_norm(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Frobenius norm of s·B·A without forming it: ‖BA‖² = Σ (BᵀB) ∘ (AAᵀ), two (R, R) products. fp32 scalar."""
    a, b = a.detach().float(), b.detach().float()
    return scaling * ((b.mT @ b) * (a @ a.mT)).sum().clamp_min(0).sqrt()
