"""Level 3: which module of a model gets which scheme, swapped in place, reported and reversible."""

from qdeepseek.surgery.chunks import check_expert_chunks, chunk_experts
from qdeepseek.surgery.coverage import Coverage, CoverageError, CoverageRow, PlannedTensor
from qdeepseek.surgery.families import is_fused_experts, is_mtp_parameter, part_of
from qdeepseek.surgery.fp8 import dequantize_fp8, load_causal_lm
from qdeepseek.surgery.plan import plan
from qdeepseek.surgery.prepare import (
    QuantizedTensor,
    autocast_experts,
    initialize_quantizers,
    prepare,
    quantized_tensors,
    register_experts_implementations,
    restore,
    untie,
)
from qdeepseek.surgery.recipe import Recipe, Rule, TensorScheme

__all__ = [
    "Coverage", "CoverageError", "CoverageRow", "PlannedTensor", "QuantizedTensor", "Recipe", "Rule", "TensorScheme",
    "autocast_experts", "check_expert_chunks", "chunk_experts", "dequantize_fp8", "initialize_quantizers",
    "is_fused_experts", "is_mtp_parameter", "load_causal_lm", "part_of", "plan", "prepare", "quantized_tensors",
    "register_experts_implementations", "restore", "untie",
]  # fmt: skip
