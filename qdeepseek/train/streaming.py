"""Which models are read tensor by tensor into the partitions of ZeRO-3, so that no rank ever holds one whole.

What needs whole weights at the start is loaded whole on every rank instead: rotation, GPTQ's codes, adapters, a model
without a checkpoint. Experts in chunks (`model.expert_chunks`) are for streamed models alone.
"""

from qdeepseek.surgery import Recipe
from qdeepseek.train.config import ConfigError, MethodConfig
from qdeepseek.train.models import ModelConfig


def rotates(method: MethodConfig, recipe: Recipe) -> bool:
    """Whether the student is rotated before quantisers are put in."""
    schemes = [rule.scheme for rule in recipe.rules if rule.scheme is not None]
    hard = any(s.input is not None and s.input.bits <= 4 for s in schemes)
    return method.rotate == "always" or (method.rotate == "auto" and hard)


def whole_because(model: ModelConfig, method: MethodConfig, recipe: Recipe, lora: bool) -> str | None:
    """Why a run needs its models whole at the start whatever its strategy is; None where it does not."""
    if model.path is None:
        return "model.scratch has no checkpoint to stream"
    if rotates(method, recipe):
        return f"method.rotate={method.rotate} rotates whole weights first"
    if method.rounding == "gptq":
        return "method.rounding=gptq calibrates the whole model first"
    return "method.lora puts adapters into the whole model first" if lora else None


def check_streams(chunks: int, reason: str | None) -> None:
    """Raises ConfigError for experts in chunks where the model is not streamed, for `reason`."""
    if chunks > 1 and reason is not None:
        raise ConfigError(
            f"model.expert_chunks {chunks} is for a checkpoint that strategy=zero3 or zero3_offload streams into "
            f"partitions, and {reason}; set model.expert_chunks=1, or change that"
        )
