"""How far a quantised tensor is from the original, and how well it uses its codes. All return 0-d fp32 tensors."""

import torch
from torch import Tensor

from qdeepseek.quant.scheme import QuantScheme


@torch.no_grad()
def mse(reference: Tensor, approximation: Tensor) -> Tensor:
    """Mean squared error, computed in fp32."""
    return (reference.float() - approximation.float()).square().mean()


@torch.no_grad()
def sqnr_db(reference: Tensor, approximation: Tensor) -> Tensor:
    """10 log10(sum r^2 / sum (r - a)^2) in dB; +inf for an exact approximation."""
    signal, noise = reference.float().square().sum(), (reference.float() - approximation.float()).square().sum()
    return torch.where(noise == 0, torch.inf, 10 * torch.log10(signal / noise))


@torch.no_grad()
def code_entropy(codes: Tensor, scheme: QuantScheme) -> Tensor:
    """Shannon entropy of the codes in bits: 0 (one code only) to log2 of the number of codes (all alike)."""
    counts = torch.bincount(codes.flatten().long() - scheme.qmin, minlength=scheme.qmax - scheme.qmin + 1)
    share = counts.float() / counts.sum()
    return torch.special.entr(share).sum() / torch.log(torch.tensor(2.0, device=share.device))


@torch.no_grad()
def saturation(codes: Tensor, scheme: QuantScheme) -> Tensor:
    """Share of codes at either end of the grid."""
    return ((codes == scheme.qmin) | (codes == scheme.qmax)).float().mean()
