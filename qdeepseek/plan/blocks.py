"""The parameters of a model as a row of blocks (embedding, decoder layers, head), in the order of the forward.

A block is what gradient checkpointing recomputes and what ZeRO-3 gathers as a whole, but for routed experts in chunks
(layers/expert_chunks.py), of which it gathers, fake-quantises and recomputes one; memory.py walks over the blocks.
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
    largest     the largest fake-quantised tensor, or chunk of one: fake-quant works on one at a time
    learned     the same of those with learned scales, which need more in the backward
    scales      learned scales
    kept        weights of linear layers and fused experts that are not quantised: autocast makes copies of them
    routed_quantised, routed_kept, routed_scales    those of `quantised`, `kept` and `scales` that are routed experts
    chunks      of the routed experts
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
    routed_quantised: int = 0
    routed_kept: int = 0
    routed_scales: int = 0
    chunks: int = 1

    @property
    def gathered(self) -> float:
        """Parameters that ZeRO-3 holds whole at once."""
        return self.parameters - self.routed + self.routed / self.chunks

    @property
    def gathered_scales(self) -> float:
        """Learned scales beside them."""
        return self.scales - self.routed_scales + self.routed_scales / self.chunks

    @property
    def chunked(self) -> bool:
        """Whether the backward computes the routed experts again, chunk by chunk."""
        return self.chunks > 1 and self.routed > 0


def blocks_of(coverage: Coverage, chunks: int = 1) -> tuple[Block, ...]:
    """Embedding, one block a decoder layer, and the rest (final norm and head); routed experts in `chunks`."""
    grouped: dict[str, list[PlannedTensor]] = {"embedding": []}
    for tensor in coverage.planned:
        layer = _LAYER.fullmatch(tensor.name)
        name = f"layer {layer[1]}" if layer else "embedding" if tensor.part == "embedding" else "head"
        grouped.setdefault(name, []).append(tensor)
    head = grouped.pop("head", [])
    return tuple(_block(name, tensors, chunks) for name, tensors in [*grouped.items(), ("head", head)])


def total(blocks: Iterable[Block], what: str) -> int:
    return sum(getattr(block, what) for block in blocks)


def _block(name: str, tensors: list[PlannedTensor], chunks: int) -> Block:
    def size(tensor: PlannedTensor) -> int:
        return tensor.numel // (chunks if tensor.part == "routed_experts" else 1)

    quantised = [t for t in tensors if t.scheme is not None]
    kept = [t for t in tensors if t.scheme is None and _is_multiplied(t)]
    learned = [t for t in quantised if t.scheme and t.scheme.method.learned]
    routed = [t for t in tensors if t.part == "routed_experts"]
    return Block(
        name,
        parameters=sum(t.numel for t in tensors),
        fp32=sum(t.numel for t in tensors if t.part == "router"),
        routed=sum(t.numel for t in routed),
        quantised=sum(t.numel for t in quantised),
        largest=max(map(size, quantised), default=0),
        learned=max(map(size, learned), default=0),
        scales=sum(_scales(t) for t in learned),
        kept=sum(t.numel for t in kept),
        largest_parameter=max(map(size, tensors), default=0),
        routed_quantised=sum(t.numel for t in quantised if t.part == "routed_experts"),
        routed_kept=sum(t.numel for t in kept if t.part == "routed_experts"),
        routed_scales=sum(_scales(t) for t in learned if t.part == "routed_experts"),
        chunks=chunks,
    )


def _is_multiplied(tensor: PlannedTensor) -> bool:
    """Whether it is the weight of a linear layer or of fused experts."""
    if len(tensor.shape) == 3:
        return tensor.part == "routed_experts"
    return tensor.module_class == "Linear" and len(tensor.shape) == 2


def _scales(tensor: PlannedTensor) -> int:
    assert tensor.scheme is not None
    return math.prod(tensor.scheme.weight.scale_shape(tensor.shape, 2 if tensor.name.endswith("gate_up_proj") else 1))
