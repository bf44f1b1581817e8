"""Round to nearest: what a prepared model computes without any training, the baseline of every other method.

ŵ = (clamp(round(w / s) + z) - z) · s      with s and z found from w by the recipe's range method
"""

from torch import nn

from qdeepseek.surgery.prepare import initialize_quantizers, quantized_tensors


def round_to_nearest(model: nn.Module) -> None:
    """Finds the scales of a prepared model from its present weights and switches every quantiser on.

    Nothing else changes: weights stay as they are and the forward rounds them. A scale fixed by `set_scale` is kept.
    Raises ValueError for a model that is not prepared.
    """
    tensors = list(quantized_tensors(model))
    if not tensors:
        raise ValueError("round_to_nearest: the model has no quantised weights; call prepare(model, recipe) first")
    initialize_quantizers(model)
    for tensor in tensors:
        tensor.quantizer.enabled = True
