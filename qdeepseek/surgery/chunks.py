"""Puts `ExpertChunks` in the place of fused experts, before quantisers are put in; works on the meta device.

`experts.gate_up_proj (E, 2I, H)` becomes `experts.from_F.gate_up_proj (E_c, 2I, H)` for F = 0, E_c, 2 E_c, …
Rules, coverage and the export go by the name without the chunk (`layers.whole_name`).
"""

import copy
from typing import Any

from torch import nn

from qdeepseek.layers import ExpertChunks
from qdeepseek.surgery.families import is_fused_experts


def chunk_experts(model: nn.Module, chunks: int) -> None:
    """Splits the routed experts of every layer into `chunks` of equal size, in place; 1 changes nothing.

    Raises ValueError, see `check_expert_chunks`, before anything is changed.
    """
    check_expert_chunks(model, chunks)
    for name, module in _fused(model) if chunks > 1 else []:
        size = int(module.num_experts) // chunks
        firsts = range(0, size * chunks, size)
        model.set_submodule(name, ExpertChunks({first: _chunk(module, first, size) for first in firsts}))


def check_expert_chunks(model: nn.Module, chunks: int) -> None:
    """Raises ValueError for a model without fused experts, and for a number that does not divide theirs."""
    found = _fused(model)
    if chunks > 1 and not found:
        raise ValueError(f"expert_chunks {chunks}: the model has no fused routed experts; leave it at 1")
    for name, module in found:
        experts = int(module.num_experts)
        if chunks < 1 or experts % chunks:
            divisors = [n for n in range(1, experts + 1) if experts % n == 0]
            raise ValueError(
                f"expert_chunks {chunks} does not divide the {experts} experts of {name}; use one of "
                f"{', '.join(map(str, divisors))}"
            )


def _fused(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if is_fused_experts(module)]


def _chunk(experts: Any, first: int, size: int) -> nn.Module:
    """Experts first … first + size as a module like `experts`; the weights are copied."""
    own = {id(p): nn.Parameter(p[first : first + size].detach().clone(), p.requires_grad) for p in experts.parameters()}
    chunk = copy.deepcopy(experts, {**own, id(experts.config): experts.config})
    chunk.num_experts = size
    chunk._is_expert_parallel = True  # an index of `size` means an expert that is not here
    return chunk
