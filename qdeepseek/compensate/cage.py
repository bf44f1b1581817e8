"""CAGE: the straight-through gradient corrected by the quantisation error, in the metric of Adam's second moment.

QAT minimises the loss f and the distance of w to the grid at once; at the best trade-off (Tabesh et al., CAGE,
arXiv 2510.18784)   grad f(w) + lambda * H (w - Q(w)) = 0,   H the curvature. Adam's D = diag(sqrt(v) + eps) stands
for H and is also what Adam divides by, so the corrected step

    w <- w - lr * D^-1 (m + lambda_t D (w - Q(w)))  =  (Adam's step)  - lr * lambda_t * (w - Q(w))

needs no second moment at all: `metric="adam"`, decoupled as weight decay is in AdamW, with the pull towards Q(w)
instead of 0. `metric="identity"` takes H = 1: the same lambda_t pulls hardest where v is small,

    w <- w - lr * lambda_t * D^-1 (w - Q(w)),           D from v as Adam corrects its bias.

In neither does the correction enter Adam's moments. It is applied after the step, to the error of the new w (the
paper's algorithm: to that of the old one; they differ by O(lr^2)), so a step that is skipped pulls nothing, and no
copy of w is kept. The pull never passes the grid point: lr * lambda_t is bounded by 1, elementwise.

lambda_t = 0 for the first `silence` of the run, then a line up to lambda at its end (`ramp`) or lambda at once.
A no-op if lr * lambda_t = 0, if fake-quant is off (Q(w) = w), and if w is on its grid. Under a schedule that takes
lr to 0 while lambda_t rises, the whole pull is  sum lr_t * lambda_t: with the paper's lambda 10 and silence 0.8,
lr 2e-4, cosine, 300 steps it is 1e-3, so lambda has to be chosen by that sum (the error shrinks by exp(-sum)).
"""

import torch
from torch import Tensor

METRICS = ("adam", "identity")


def strength(step: int, steps: int, peak: float, silence: float, ramp: bool) -> float:
    """lambda_t of optimizer step `step` (from 0) of `steps`: 0 while step < silence * steps, then up to `peak`."""
    quiet = silence * steps
    if step < quiet or steps <= quiet:
        return 0.0
    return peak * (step + 1 - quiet) / (steps - quiet) if ramp else peak


def pull_(w: Tensor, w_hat: Tensor, rate: float, denominator: Tensor | None = None) -> None:
    """w -= min(1, rate / denominator) * (w - w_hat), in place; denominator like w, or None for 1."""
    error = w - w_hat
    if denominator is None:
        w.sub_(error, alpha=min(1.0, rate))
    else:
        w.sub_(error * (rate / denominator).clamp(max=1.0))


def adam_denominator(v: Tensor, step: Tensor | float, beta2: float, eps: float) -> Tensor:
    """sqrt(v / (1 - beta2^step)) + eps, as Adam divides by; step is the number of steps taken, v after them."""
    return (v / (1 - beta2 ** torch.as_tensor(step, dtype=v.dtype, device=v.device))).sqrt().add_(eps)
