"""DeepSeek-V3's loss-free balancing: b_e ← b_e + u · sign(mean load − load_e) after each optimizer step.

The bias enters the choice of experts only, never their weight, so it costs no gradient. Source: Wang et al.,
"Auxiliary-Loss-Free Load Balancing" (arXiv 2408.15664); DeepSeek-V3 uses u = 0.001 (arXiv 2412.19437, 4.2).
"""

from torch import Tensor


def update_bias_(bias_E: Tensor, load_E: Tensor, speed: float = 1e-3) -> None:
    """In-place update of `e_score_correction_bias` (fp32) from the global load of the last step."""
    bias_E.add_((load_E.mean(-1, keepdim=True) - load_E).sign().to(bias_E.dtype), alpha=speed)
