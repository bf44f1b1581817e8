"""y = x_hat W_hat^T + b: a Linear that computes with its quantised weight (W4A16) and input (W4A8)."""

import torch.nn.functional as F
from torch import Tensor, nn

from qdeepseek.layers.activation_quantizer import ActivationQuantizer
from qdeepseek.layers.autocast import as_autocast
from qdeepseek.layers.rematerialise import rematerialise
from qdeepseek.layers.weight_quantizer import WeightQuantizer


def require_plain_weight(module: nn.Module, owner: str) -> None:
    """Raise ValueError if `weight` is not the module's own Parameter (LoRA or another parametrisation on it)."""
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        raise ValueError(
            f"{owner}: weight of {type(module).__name__} is not a plain Parameter (parametrised by LoRA?); "
            "quantise first, add adapters afterwards"
        )


class QuantLinear(nn.Linear):
    """An nn.Linear with a `weight_quantizer` and, if activations are quantised, an `input_quantizer`.

    Built by `from_linear`; shares weight and bias Parameters with the module it replaces, and gives them back
    in `to_linear`.  Adapters that parametrise `weight` act before quantisation: merging them changes nothing.
    """

    weight_quantizer: WeightQuantizer
    input_quantizer: ActivationQuantizer | None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        weight_quantizer: WeightQuantizer,
        input_quantizer: ActivationQuantizer | None = None,
    ) -> "QuantLinear":
        require_plain_weight(linear, "QuantLinear.from_linear")
        module = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        module.weight, module.bias = linear.weight, linear.bias
        module.weight_quantizer, module.input_quantizer = weight_quantizer, input_quantizer
        return module.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """A plain Linear with the same (unquantised) Parameters."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        if self.input_quantizer is not None:
            input = self.input_quantizer(input)
        w = self.weight  # once: a parametrised weight is computed at every access
        w_hat = self.weight_quantizer(w)
        if not self.weight_quantizer.recompute:
            return F.linear(input, w_hat, self.bias)
        w_hat = as_autocast(w_hat)  # here, where the cast's storage is known, else autograd would keep it
        with rematerialise((self.weight_quantizer, w, w_hat)):
            return F.linear(input, w_hat, self.bias)
