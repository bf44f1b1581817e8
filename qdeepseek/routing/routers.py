"""The routers of a transformers mixture of experts, and their probabilities from their logits.

A router maps hidden states to (logits z_TE, weights_TK, indices_TK) and scores its experts by s(z):

    softmax   s = softmax(z)      DeepSeek-V2, Mixtral, Qwen-MoE
    sigmoid   s = σ(z)            DeepSeek-V3: chosen by s + bias, weighted by s
    other     s = score_fn(z)     DeepSeek-V4

Probabilities are the scores normalised per token, p = s / Σs = softmax(log s); the bias of the choice is no part of
them. Everything is computed in fp32 (fp64 stays). E experts, T tokens, K top-k.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> router, in order of layers; routers with a fixed table of choices (hash routing) are left out.

    Raises ValueError where routers differ in their number of experts.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if "Router" in type(module).__name__
        and all(hasattr(module, key) for key in ("weight", "top_k", "num_experts"))
        and not hasattr(module, "tid2eid")
    }
    sizes = {name: int(router.num_experts) for name, router in found.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"routers differ in their number of experts: {sizes}; one number for all layers is supported")
    return found


def keep_routers_exact(model: nn.Module) -> None:
    """Routers compute as they are written, in fp32, also where autocast would round their matrix product to bf16."""

    def enter(router: nn.Module, args: Any) -> None:
        router.__dict__["_exact"] = context = torch.autocast(args[0].device.type, enabled=False)
        context.__enter__()

    def leave(router: nn.Module, *_: Any) -> None:
        router.__dict__.pop("_exact").__exit__(None, None, None)

    for router in find_routers(model).values():
        if router.__dict__.setdefault("_kept_exact", False):
            continue
        router.__dict__["_kept_exact"] = True
        router.register_forward_pre_hook(enter)
        router.register_forward_hook(leave, always_call=True)


def layer_number(name: str) -> int:
    """Index of the decoder layer in a module name: `model.layers.3.mlp.gate` -> 3.

    Raises ValueError where the name has none.
    """
    match = _LAYER.search(name)
    if match is None:
        raise ValueError(f"router {name} lies in no `layers.N`; give a transformers decoder")
    return int(match[1])


def log_probabilities(router: nn.Module, logits_TE: Tensor) -> Tensor:
    """log p (T, E) of a router's own scoring, fp32 (fp64 for fp64 logits), differentiable."""
    z = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    score = getattr(router, "score_fn", None)
    if score is not None:
        return F.log_softmax(score(z).clamp_min(1e-30).log(), -1)
    return F.log_softmax(F.logsigmoid(z) if hasattr(router, "e_score_correction_bias") else z, -1)
