"""Names of a checkpoint: the fused 3-D experts of transformers 5 against one tensor per expert on disk.

    mlp.experts.gate_up_proj  (E, 2I, H) = [gate; up]   <->  mlp.experts.N.gate_proj.weight  (I, H)
                                                             mlp.experts.N.up_proj.weight    (I, H)
    mlp.experts.down_proj     (E, H, I)                 <->  mlp.experts.N.down_proj.weight  (H, I)

Every runtime reads the right-hand side, the names of the original DeepSeek checkpoints, and so does
transformers' own `save_pretrained`; experts in chunks (layers/expert_chunks.py) are on disk as any others.
Mixtral's checkpoint says block_sparse_moe and w1 / w3 / w2. The table below is the inverse of
transformers/conversion_mapping.py for the families this project quantises; a test compares the two.
"""

import re
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How a family's checkpoint names its experts, and which module names differ from the model's."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renames: tuple[tuple[str, str], ...] = ()  # (part of a model's name, the same part in the checkpoint)


@dataclass(frozen=True)
class ModelName:
    """Where a checkpoint tensor lives in the model: a parameter, or one expert's rows of a fused one."""

    parameter: str
    expert: int | None = None
    part: str | None = None  # gate | up | down for an expert


DEEPSEEK = Layout()
MIXTRAL = Layout("w1", "w3", "w2", renames=((".mlp.", ".block_sparse_moe."),))

LAYOUTS = {
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "qwen2_moe": DEEPSEEK,
    "qwen3_moe": DEEPSEEK,
    "mixtral": MIXTRAL,
}

_FUSED = re.compile(r"(.*\.experts)(?:\.from_(?P<first>\d+))?\.(?:gate_up_proj|down_proj)")


def layout_of(model_type: str, *, fused: bool = True) -> Layout:
    """Layout of a family; dense models (`fused=False`) keep their names and need no entry in the table."""
    if model_type in LAYOUTS:
        return LAYOUTS[model_type]
    if not fused:
        return DEEPSEEK
    raise ValueError(
        f"model_type {model_type!r} has fused experts and no entry in the table of checkpoint names "
        f"({', '.join(LAYOUTS)}); add its Layout to qdeepseek/export/names.py"
    )


def is_fused(parameter: str) -> bool:
    """True for a 3-D parameter that holds one projection of all experts of a layer, or of a chunk of them."""
    return _FUSED.fullmatch(parameter) is not None


def to_checkpoint(parameter: str, layout: Layout) -> str:
    """Checkpoint name of a parameter or module that is not a fused one."""
    for model, checkpoint in layout.renames:
        parameter = parameter.replace(model, checkpoint)
    return parameter


def expert_module(parameter: str, expert: int, part: str, layout: Layout) -> str:
    """Checkpoint name of the Linear that holds `part` (gate, up, down) of one expert of a fused parameter.

    expert: its index in the parameter; in a chunk, `….experts.from_32.down_proj`, 0 is expert 32.
    """
    match = _FUSED.fullmatch(parameter)
    if match is None:
        raise ValueError(f"{parameter} is no fused experts parameter (…experts.gate_up_proj or .down_proj)")
    return f"{to_checkpoint(match[1] + '.', layout)}{int(match['first'] or 0) + expert}.{getattr(layout, part)}"


def parts_of(parameter: str) -> tuple[str, ...]:
    """Projections a fused parameter holds, in the order of its rows."""
    return ("gate", "up") if parameter.endswith("gate_up_proj") else ("down",)


def rows_of(part: str | None, tensor_OI: Tensor) -> Tensor:
    """Rows of one projection in one expert's slice of a fused weight, its codes, scales or zero points."""
    half = tensor_OI.shape[0] // 2
    return {"gate": tensor_OI[:half], "up": tensor_OI[half:]}.get(part or "", tensor_OI)


def to_model(name: str, layout: Layout) -> ModelName:
    """Parses a checkpoint tensor's name, `….experts.3.up_proj.weight` -> (….experts.gate_up_proj, 3, up)."""
    for model, checkpoint in layout.renames:
        name = name.replace(checkpoint, model)
    parts = {getattr(layout, part): part for part in ("gate", "up", "down")}
    match = re.fullmatch(rf"(.*\.experts)\.(\d+)\.({'|'.join(parts)})\.weight", name)
    if match is None:
        return ModelName(name)
    part = parts[match[3]]
    fused = "down_proj" if part == "down" else "gate_up_proj"
    return ModelName(f"{match[1]}.{fused}", int(match[2]), part)
