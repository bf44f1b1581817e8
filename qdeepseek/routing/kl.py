"""Routing drift: how far a router's probabilities are from those of the unquantised model for the same token.

KL_t = Σ_e q_te (log q_te − log p_te)      q: unquantised router, p: trained router, nats
"""

import torch.nn.functional as F
from torch import Tensor


def router_kl(log_p_TE: Tensor, log_q_TE: Tensor, real_T: Tensor) -> Tensor:
    """Mean KL(q ‖ p) over the tokens that are no padding; 0 without such a token."""
    kl_T = F.kl_div(log_p_TE, log_q_TE, reduction="none", log_target=True).sum(-1)
    real_T = real_T.to(kl_T.dtype)
    return (kl_T * real_T).sum() / real_T.sum().clamp_min(1)
