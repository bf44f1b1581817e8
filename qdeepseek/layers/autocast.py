"""The cast of a weight that `torch.autocast` makes for a Linear, made by hand for products that autocast does not know.

Autocast casts the operands of a listed matrix product. `grouped_mm` is not listed: with fp32 weights it multiplies in
fp32, at a fraction of a GPU's bf16 rate. w_hat is cast after fake-quantisation, which is fp32 from fp32 weights, so
that the product sees the code times the scale rounded once to bf16, and gradients pass the cast back in fp32.
"""

import torch
from torch import Tensor


def as_autocast(tensor: Tensor) -> Tensor:
    """`tensor` as a product under the present autocast takes it; itself outside, and in fp64 as autocast does."""
    kind = tensor.device.type
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
