"""The parameters of a model as a row of blocks (embedding, decoder layers, head), in the order of the forward.

A block is what gradient checkpointing recomputes and what ZeRO-3 gathers as a whole; memory.py walks over them.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from qdeepseek.surgery import Coverage
from qdeepseek.surgery.coverage import PlannedTensor

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")


@dataclass(frozen=True)
class Block:
    """Elements of one block.

    parameters  all but learned scales; fp32: those of them that stay in fp32 (routers)
    routed      those of routed experts
    quantised   those that are fake-quantised
    largest     the largest fake-quantised tensor: fake-quant works on one at a time
    learned     the same of those with learned scales, which need more in the backward
    scales      learned scales
    kept        weights of linear layers and fused experts that are not quantised: autocast makes copies of them
    """

    name: str
    parameters: int = 0
    fp32: int = 0
    routed: int = 0
    quantised: int = 0
    largest: int = 0
    learned: int = 0
    scales: int = 0
    kept: int = 0
    largest_parameter: int = 0


def blocks_of(coverage: Coverage) -> tuple[Block, ...]:
    """Embedding, one block a decoder layer, and the rest (final norm and head)."""
    grouped: dict[str, list[PlannedTensor]] = {"embedding": []}
    for tensor in coverage.planned:
        layer = _LAYER.fullmatch(tensor.name)
        name = f"layer {layer[1]}" if layer else "embedding" if tensor.part == "embedding" else "head"
        grouped.setdefault(name, []).append(tensor)
    head = grouped.pop("head", [])
    return tuple(_block(name, tensors) for name, tensors in [*grouped.items(), ("head", head)])


def total(blocks: Iterable[Block], what: str) -> int:
    return sum(getattr(block, what) for block in blocks)


def _block(name: str, tensors: list[PlannedTensor]) -> Block:
    quantised = [t for t in tensors if t.scheme is not None]
    learned = [t for t in quantised if t.scheme and t.scheme.method.learned]
    routed = [t for t in tensors if t.part == "routed_experts"]
    return Block(
        name,
        parameters=sum(t.numel for t in tensors),
        fp32=sum(t.numel for t in tensors if t.part == "router"),
        routed=sum(t.numel for t in routed),
        quantised=sum(t.numel for t in quantised),
        largest=max((t.numel for t in quantised), default=0),
        learned=max((t.numel for t in learned), default=0),
        scales=sum(_scales(t) for t in learned),
        kept=sum(t.numel for t in tensors if t.scheme is None and _is_multiplied(t)),
        largest_parameter=max((t.numel for t in tensors), default=0),
    )


def _is_multiplied(tensor: PlannedTensor) -> bool:
    """Whether it is the weight of a linear layer or of fused experts."""
    if len(tensor.shape) == 3:
        return tensor.part == "routed_experts"
    return tensor.module_class == "Linear" and len(tensor.shape) == 2


def _scales(tensor: PlannedTensor) -> int:
    assert tensor.scheme is not None
    return math.prod(tensor.scheme.weight.scale_shape(tensor.shape, 2 if tensor.name.endswith("gate_up_proj") else 1))
