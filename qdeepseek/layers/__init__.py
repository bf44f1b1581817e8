"""Level 2: modules that own quantisation parameters and compute with quantised weights and inputs."""

from qdeepseek.layers.activation_quantizer import ActivationQuantizer
from qdeepseek.layers.embedding import QuantEmbedding
from qdeepseek.layers.expert_chunks import ExpertChunks, whole_name
from qdeepseek.layers.experts import (
    attach_expert_quantizers,
    detach_expert_quantizers,
    has_expert_quantizers,
    naive_experts_forward,
    quant_experts_forward,
    tap_experts,
)
from qdeepseek.layers.level import LEVELS, Level, ladder, scheme_at
from qdeepseek.layers.linear import QuantLinear
from qdeepseek.layers.weight_quantizer import WeightQuantizer

__all__ = [
    "LEVELS", "ActivationQuantizer", "ExpertChunks", "Level", "QuantEmbedding", "QuantLinear", "WeightQuantizer",
    "attach_expert_quantizers", "detach_expert_quantizers", "has_expert_quantizers", "ladder",
    "naive_experts_forward", "quant_experts_forward", "scheme_at", "tap_experts", "whole_name",
]  # fmt: skip
