"""Which part of a model a module is: routed experts, router, attention, ... by module name and class.

Names and classes are those of transformers 5 for deepseek_v2 / v3 / v4, qwen2_moe / qwen3_moe, mixtral, llama, qwen2
and deepseek_vl; per-expert `experts.N.*` Linear layers (remote-code checkpoints) are understood too. The order of the
tests below matters: a vision tower also has `self_attn`, a shared expert also sits inside `mlp`.
"""

import re
from typing import Literal

from torch import Tensor, nn

Part = Literal[
    "routed_experts", "shared_experts", "router", "attention", "mlp", "embedding", "head", "norm",
    "vision", "aligner", "mtp", "other",
]  # fmt: skip

NEVER_QUANTIZED: frozenset[str] = frozenset({"router", "norm", "vision", "aligner", "mtp"})

_VISION = re.compile(r"(.*\.)?(vision_model|vision_tower|visual|sam_vision\w*|high_res_vision\w*)(\..*)?")
_ALIGNER = re.compile(r"(.*\.)?(aligner|multi_modal_projector|projector)(\..*)?")
_MTP = re.compile(r"(.*\.)?(mtp|eh_proj|enorm|hnorm|shared_head)(\..*)?")
_ROUTER = re.compile(r"(.*\.)?((mlp|block_sparse_moe)\.gate|router|shared_expert_gate)")
_EXPERT_LIST = re.compile(r"(.*\.)?experts\.\d+\..*")
_SHARED = re.compile(r"(.*\.)?shared_experts?\..*")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)(?:\..*)?")

# Runtimes compute the members of a group with one matrix multiplication, so they must share one scheme.
FUSION_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


def is_fused_experts(module: nn.Module) -> bool:
    """True for a module that holds all experts as 3-D `gate_up_proj` (E, 2I, H) and `down_proj` (E, H, I).

    A weight that DeepSpeed has partitioned is empty, and keeps its shape as `ds_shape`.
    """
    weights = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    return all(isinstance(w, Tensor) and len(getattr(w, "ds_shape", w.shape)) == 3 for w in weights)


def part_of(name: str, module: nn.Module) -> Part:
    """The part of the model that `module`, called `name` in the model, belongs to."""
    class_name = type(module).__name__
    for pattern, part in ((_VISION, "vision"), (_ALIGNER, "aligner"), (_MTP, "mtp")):
        if pattern.fullmatch(name):
            return part  # type: ignore[return-value]
    if "Router" in class_name or _ROUTER.fullmatch(name):
        return "router"
    if "Norm" in class_name:
        return "norm"
    if is_fused_experts(module) or _EXPERT_LIST.fullmatch(name):
        return "routed_experts"
    if _SHARED.fullmatch(name):
        return "shared_experts"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if name.rpartition(".")[2] in ("lm_head", "output", "embed_out"):
        return "head"
    if ".self_attn" in f".{name}":
        return "attention"
    if ".mlp" in f".{name}":
        return "mlp"
    return "other"


def is_mtp_parameter(name: str, num_hidden_layers: int) -> bool:
    """True for a checkpoint tensor of the multi-token-prediction module, stored as layers after the last one.

    DeepSeek-V3 keeps it as `model.layers.61.*`; transformers does not load it, the exporter copies it.
    """
    layer = _LAYER.fullmatch(name)
    return bool(_MTP.fullmatch(name)) or (layer is not None and int(layer[1]) >= num_hidden_layers)
