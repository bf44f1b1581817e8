"""Dynamic fake-quant of a layer's input: every token finds its own scale; no state, straight-through gradient."""

from torch import Tensor, nn

from qdeepseek.quant import QuantScheme, fake_quantize_activation


class ActivationQuantizer(nn.Module):
    """x (.., I) -> x_hat, same shape and dtype; granularity per_token, or per_group within the token.

    Raises ValueError for a scheme whose scales would mix tokens (a batch would then change a token's value).
    """

    def __init__(self, scheme: QuantScheme) -> None:
        super().__init__()
        if scheme.granularity not in ("per_token", "per_group"):
            raise ValueError(
                f"ActivationQuantizer: granularity {scheme.granularity!r} is refused, one token would change "
                "another; use per_token or per_group"
            )
        self.scheme = scheme
        self.enabled = True

    def extra_repr(self) -> str:
        sign = "symmetric" if self.scheme.symmetric else "asymmetric"
        return f"int{self.scheme.bits} {self.scheme.granularity} {sign} dynamic, enabled={self.enabled}"

    def forward(self, x: Tensor) -> Tensor:
        return fake_quantize_activation(x, self.scheme) if self.enabled else x
