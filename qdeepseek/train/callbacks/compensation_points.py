"""Where gradients are compensated: output of the embedding, input of every down_proj, output of every up_proj.

A point is one of these of one module: of a dense MLP or shared expert by hooks on its Linear layers, of fused routed
experts by taps between their two matmuls, where one point has a row of statistics for every expert. A gradient hook
lies on the graph that the backward walks. Gradient checkpointing builds that graph once and, in the backward,
a second one that only refills saved tensors, so a hook acts once; a forward without gradient places none.

Hooks are kept out of compiled regions: torch.compile breaks the graph at a hooked Linear, embedding or experts module
and compiles what lies between. `fullgraph=True` over a hooked module is refused by torch.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qdeepseek.compensate.tokens import PerExpert, Tokens, Whole
from qdeepseek.layers import tap_experts, whole_name
from qdeepseek.surgery.families import is_fused_experts, part_of

# (number of the point, gradient, its tokens) -> compensated gradient
Handler = Callable[[int, Tensor, Tokens], Tensor]

_EXPERT_NUMBER = re.compile(r"\.experts\.\d+(?=\.|$)")


class Point(NamedTuple):
    """kind: embedding, down or up; name: of its log entries; module: that is hooked; groups: 1, or the experts."""

    kind: str
    name: str
    module: nn.Module
    groups: int


def find_points(model: nn.Module) -> list[Point]:
    """Points of a model in module order, vision towers and multi-token prediction left out.

    Experts that are a list of modules (remote code, chunks) share the log entry of their list, without their numbers.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    found = []
    for name, module in model.named_modules():
        if part_of(name, module) in ("vision", "aligner", "mtp"):
            continue
        short = _EXPERT_NUMBER.sub(".experts", whole_name(name)).replace(".base_layer", "")  # put in by peft's adapters
        if module is embedding:
            found.append(Point("embedding", short, module, 1))
        elif is_fused_experts(module):
            experts = int(module.num_experts)
            found += [
                Point("up", f"{short}.up_proj", module, experts),
                Point("down", f"{short}.down_proj", module, experts),
            ]
        elif {"up_proj", "down_proj"} <= module._modules.keys():
            up, down = module.get_submodule("up_proj"), module.get_submodule("down_proj")
            found += [Point("up", f"{short}.up_proj", up, 1), Point("down", f"{short}.down_proj", down, 1)]
    return found


def place_hooks(points: list[Point], handle: Handler) -> Iterator[Callable[[], Any]]:
    """Hook every point; yields functions that take the hooks away again.

    Raises ValueError for fused experts that no quantiser makes reachable (see `tap_experts`).
    """
    taps: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    for number, (kind, _, module, groups) in enumerate(points):
        if is_fused_experts(module):
            parts = taps.setdefault(id(module), (module, {}))[1]
            parts["gate_up" if kind == "up" else "down_input"] = _tap(number, groups, kind, handle)
        elif kind == "down":
            yield module.register_forward_pre_hook(_before(number, handle)).remove
        else:
            yield module.register_forward_hook(_after(number, handle)).remove
    for module, parts in taps.values():
        tap_experts(module, **parts)
        yield partial(tap_experts, module)


def _before(number: int, handle: Handler) -> Callable[..., None]:
    @torch.compiler.disable
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: handle(number, grad, Whole()))

    return hook


def _after(number: int, handle: Handler) -> Callable[..., None]:
    @torch.compiler.disable
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: handle(number, grad, Whole()))

    return hook


def _tap(number: int, experts: int, kind: str, handle: Handler) -> Callable[[Tensor, Tensor], Tensor]:
    @torch.compiler.disable
    def tap(rows: Tensor, expert_S: Tensor) -> Tensor:
        def down(grad: Tensor) -> Tensor:
            return handle(number, grad, PerExpert(expert_S, experts))

        def up(grad: Tensor) -> Tensor:  # of [gate; up]: gate's half stays
            gate, own = grad.chunk(2, -1)
            return torch.cat([gate, handle(number, own, PerExpert(expert_S, experts))], -1)

        if rows.requires_grad:
            rows.register_hook(up if kind == "up" else down)
        return rows

    return tap
