"""The quantised matrices of an export as runtimes see them: fused, with the dimension that tensor parallelism divides.

q, k, v             one matrix, outputs divided; fewer key heads than ranks are repeated
q_a, kv_a           one matrix, whole on every rank (kv_a alone where there is no q_a)
gate, up            one matrix, outputs divided
o, down             inputs divided
everything else     outputs divided
"""

from collections.abc import Iterator
from dataclasses import replace

from qdeepseek.plan.architecture import Architecture
from qdeepseek.surgery import Coverage
from qdeepseek.surgery.coverage import PlannedTensor
from qdeepseek.surgery.runtimes import Layer

_FUSED = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
_INPUTS = ("o_proj", "down_proj")


def serving_layers(coverage: Coverage, a: Architecture, tp: int, dtype: str = "bfloat16") -> tuple[Layer, ...]:
    """One Layer for each different matrix, with the number of decoder layers that have it."""
    counts: dict[Layer, int] = {}
    for layer in _layers(coverage, a, tp, dtype):
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(replace(layer, count=count) for layer, count in counts.items())


def _layers(coverage: Coverage, a: Architecture, tp: int, dtype: str) -> Iterator[Layer]:
    parents: dict[str, dict[str, PlannedTensor]] = {}
    for tensor in coverage.planned:
        if tensor.scheme is not None:
            parent, _, leaf = tensor.name.removesuffix(".weight").rpartition(".")
            parents.setdefault(parent, {})[leaf] = tensor
    for parent, tensors in parents.items():
        if "gate_up_proj" in tensors and len(tensors["gate_up_proj"].shape) == 3:
            yield _experts(tensors["gate_up_proj"], tensors["down_proj"], dtype)
            continue
        place = "shared_experts." if "shared_expert" in parent else ""
        while tensors:
            leaf = next(iter(tensors))
            group = next((g for g in _FUSED if leaf in g), (leaf,))
            members = {name: tensors.pop(name) for name in group if name in tensors}
            yield _dense(place, members, a, tp, dtype)


def _dense(place: str, members: dict[str, PlannedTensor], a: Architecture, tp: int, dtype: str) -> Layer:
    first = next(iter(members))
    pieces = []
    for name, tensor in members.items():
        repeated = name in ("k_proj", "v_proj") and not a.mla and a.kv_heads < tp
        pieces.append(tensor.shape[0] // a.kv_heads * tp if repeated else tensor.shape[0])
    cut = "none" if first in _WHOLE else "inputs" if first in _INPUTS else "outputs"
    names = "+".join(name.removesuffix("_proj").removesuffix("_proj_with_mqa") for name in members)
    return _formatted(f"{place}{names}", members[first], tuple(pieces), cut, dtype)


def _experts(gate_up: PlannedTensor, down: PlannedTensor, dtype: str) -> Layer:
    count, double, _ = gate_up.shape
    layer = _formatted("experts", gate_up, (double // 2, double // 2), "outputs", dtype)
    return replace(layer, experts=count, inner=down.shape[-1])


def _formatted(name: str, tensor: PlannedTensor, pieces: tuple[int, ...], cut: str, dtype: str) -> Layer:
    assert tensor.scheme is not None
    weight, activation = tensor.scheme.weight, tensor.scheme.input_of(tensor.name)
    return Layer(
        name, tensor.shape[-1], pieces, cut, weight.group_size or -1, weight.bits, weight.symmetric,
        activation.bits if activation else 16, dtype,
    )  # fmt: skip
