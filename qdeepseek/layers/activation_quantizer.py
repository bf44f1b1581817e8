"""Dynamic fake-quant of a layer's input: every token finds its own scale; no state, straight-through gradient.

Layers that read the same tensor (gate and up, the two low-rank projections of MLA) share one x_hat while training:
it is computed once, and autograd keeps one copy of it instead of one a layer, as it does of x without quantisation.
"""

import weakref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qdeepseek.layers.level import Levelled, scheme_at
from qdeepseek.quant import QuantScheme, fake_quantize_activation

# x -> {scheme: (version of x, weak reference to x_hat)}; an entry lives as long as x, x_hat as long as a graph needs it
_shared: WeakIdKeyDictionary = WeakIdKeyDictionary()


class ActivationQuantizer(Levelled):
    """x (.., I) -> x_hat, same shape and dtype; granularity per_token, or per_group within the token.

    `scheme` is the target; at another level the forward uses `scheme_at(scheme, level)`, see level.py.

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
        return f"int{self.scheme.bits} {self.scheme.granularity} {sign} dynamic, enabled={self.enabled}" + (
            "" if self.level == "target" else f", level={self.level}"
        )

    def forward(self, x: Tensor) -> Tensor:
        scheme = scheme_at(self.scheme, self.level)
        if not self.enabled or scheme is None:
            return x
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or x.is_inference():
            return fake_quantize_activation(x, scheme)
        known = _shared.setdefault(x, {})
        version, reference = known.get(scheme, (None, None))
        x_hat = reference() if reference is not None and version == x._version else None
        if x_hat is None:
            x_hat = fake_quantize_activation(x, scheme)
            known[scheme] = (x._version, weakref.ref(x_hat))
        return x_hat
