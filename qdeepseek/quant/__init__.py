"""Level 0: the arithmetic of quantisation. Tensors and numbers in, tensors out; torch only."""

from qdeepseek.quant.fake_quantize import fake_quantize_activation, fake_quantize_weight
from qdeepseek.quant.grid import dequantize, quantize, round_scale, scale_from_range
from qdeepseek.quant.ranges import find_range
from qdeepseek.quant.scheme import QuantScheme, RangeMethod

__all__ = [
    "QuantScheme", "RangeMethod", "dequantize", "fake_quantize_activation", "fake_quantize_weight",
    "find_range", "quantize", "round_scale", "scale_from_range",
]  # fmt: skip
