"""The gradient of LSQ's scales, bounded per group by that of the weights it scales.

LSQ wants scales and weights to move by comparable shares of themselves (Esser et al., arXiv 1902.08153, 2.2):

    R = (|dL/ds| / s) / (||dL/dw|| / ||w||)  near 1,      norms over the group of weights that s scales

and multiplies dL/ds by g = 1 / sqrt(n * qmax), n the weights of a group (quant/lsq.py does). But g is constant in time,
and Adam cancels every such factor, per element (see seed.py): under Adam, LSQ's own normalisation is a no-op up
to eps and to the share of the scales in the clipped global norm. What is not cancelled is a factor that moves:

    dL/ds <- dL/ds * min(1, limit / R)

so a step on which a group's scale alone has a large gradient counts as one of limit * R = 1. A no-op while
R <= limit in every group, so for limit = infinity. For limit -> 0 every group is bounded, and its gradient is
sign(dL/ds) * s * ||dL/dw|| / ||w|| times a constant that Adam cancels.
Scaling the loss changes nothing. Under DDP it is computed from averaged gradients, so it is the same on every rank.
"""

import torch
from torch import Tensor

from qdeepseek.compensate.tokens import Compensated


def normalise(grad_s: Tensor, s: Tensor, grad_w: Tensor, w: Tensor, limit: float) -> Compensated:
    """Bounds dL/ds.

    grad_s, s: (.., O, G); grad_w, w: any shape with `reshape(*s.shape, -1)` the weights of each scale, as
    quant/grid.py lays them out. `fired` and `factor` are single numbers: the share of bounded groups, mean factor.
    """
    tiny = torch.finfo(grad_s.dtype).tiny
    norm_g, norm_w = (t.detach().reshape(*s.shape, -1).to(s.dtype).norm(dim=-1) for t in (grad_w, w))
    bound = limit * s.detach().abs() * norm_g / norm_w.clamp_min(tiny)
    on = grad_s.abs() > bound
    factor = torch.where(on, bound / grad_s.abs(), 1.0)
    grad = torch.where(on, bound * grad_s.sign(), grad_s)
    fired = on.to(s.dtype)
    return Compensated(grad, fired.mean().view(1), factor.mean().view(1), s.new_empty(1, 0))
