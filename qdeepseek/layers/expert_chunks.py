"""The routed experts of a layer in chunks of neighbours, so that no more than one chunk need be whole at a time.

    y = sum over chunks c of  y_c,    y_c,t = sum over the chosen experts e of t that lie in c of  p_te * expert_e(x_t)

A chunk is a fused experts module of its own, with its own Parameters and quantisers: ZeRO-3 gathers, fake-quantises
and releases one after the other, where a layer of DeepSeek-V3 is 11.3·10⁹ parameters at once. Choices outside of a
chunk get the index E_c, transformers' sign for another rank's expert, which costs no matrix product. Every rank enters
every chunk in the same order, whatever its tokens chose, so that none waits for another.

Each chunk is checkpointed by itself: what its backward needs (w_hat, rows of its tokens) is computed again for one
chunk at a time. With gradient checkpointing of the layer around it, that is one more forward of the experts.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_CHUNK = re.compile(r"(^|\.)experts\.from_\d+(?=\.|$)")


def whole_name(name: str) -> str:
    """Name of the fused experts, or of a parameter of them, without the chunk: `….experts.from_32` -> `….experts`."""
    return _CHUNK.sub(r"\1experts", name)


class ExpertChunks(nn.Module):
    """Fused experts modules by the index of their first expert, in order: experts.from_0, experts.from_32, …"""

    def __init__(self, chunks: Mapping[int, nn.Module]):
        super().__init__()
        for first, chunk in chunks.items():
            self.add_module(f"from_{first}", chunk)
        self.firsts = tuple(chunks)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (T, H), top_k_index and top_k_weights (T, K) -> (T, H)."""
        output_TH: Tensor | None = None
        for first, chunk in zip(self.firsts, self.children(), strict=True):
            experts = int(chunk.num_experts)  # type: ignore[arg-type]
            index_TK = top_k_index - first
            index_TK = index_TK.masked_fill((index_TK < 0) | (index_TK >= experts), experts)
            inputs = (hidden_states, index_TK, top_k_weights)
            if torch.is_grad_enabled():
                part_TH = checkpoint(chunk, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                part_TH = chunk(*inputs)
            output_TH = part_TH if output_TH is None else output_TH + part_TH
        assert output_TH is not None
        return output_TH
