"""Bytes that autograd keeps from the forward to the backward, a token and decoder layer, operation by operation.

    RMSNorm (w)      its input and the normalised input, w each, and 1 / rms (fp32)
    linear           its input once, also where several layers read it
    attention        q (h·d_q), k, v, the output (h·d_v) and the log-sum-exp (h, fp32); without a fused kernel the
                     L weights of every head; latent attention also keeps kv_b's whole output and a copy of its own
    gate, up, down   gate, silu(gate), up and their product: 4 I
    routed experts   top_k rows of: the input H, [gate; up] 2 I, silu 1 I, product 1 I, the output H

Three kinds of arithmetic: `full` (everything in the weights' fp32), `bf16` (everything in bf16; norms and routers
compute in fp32 and keep an fp32 copy of their input), `mixed` (autocast: the residual stream and norms in fp32; every
linear layer keeps its own bf16 copy of its input, routed experts too, see layers/autocast.py). The first two are
compared with autograd in a test; autocast on a GPU is not.
"""

from dataclasses import dataclass
from typing import Literal

from qdeepseek.plan.architecture import Architecture, Kind

Arithmetic = Literal["full", "bf16", "mixed"]


@dataclass(frozen=True)
class Bytes:
    """Bytes of one element of each kind of tensor."""

    compute: int  # outputs of linear layers
    stream: int  # residual stream between layers
    normalised: int  # what a norm keeps beside its fp32 input
    copies: bool  # every linear layer keeps a copy of its input


KINDS = {
    "full": Bytes(4, 4, 4, False),
    "bf16": Bytes(2, 2, 2, False),
    "mixed": Bytes(2, 4, 4, True),
}


def saved(a: Architecture, kind: Kind, arithmetic: Arithmetic, length: int, fused_attention: bool = True) -> float:
    """Bytes a token that the backward of one decoder layer needs, without weights."""
    b = KINDS[arithmetic]
    mlp = _moe(a, b) if kind == "moe" else _norm(a.hidden, b) + _inputs(a.hidden, 2, b) + 4 * a.dense * b.compute
    return _attention(a, b, length, fused_attention) + mlp


def _norm(width: int, b: Bytes) -> int:
    return width * (4 + b.normalised) + 4


def _inputs(width: int, readers: int, b: Bytes) -> int:
    return width * b.compute * (readers if b.copies else 1)


def _attention(a: Architecture, b: Bytes, length: int, fused: bool) -> float:
    query_and_output = a.heads * (a.query + a.value)
    keys_and_values = (a.heads if a.mla else a.kv_heads) * (a.query + a.value)
    if a.mla and fused:  # values are a view of kv_b's output, which is kept whole; o_proj reads a copy of the output
        keys_and_values += a.heads * (a.query - a.rope + a.value)
    inside = a.heads * 4 if fused else a.heads * length * 4
    return _norm(a.hidden, b) + _projections(a, b) + (query_and_output + keys_and_values) * b.compute + inside


def _projections(a: Architecture, b: Bytes) -> float:
    """Inputs of the projections before attention: q, k and v, or (q_a, q_b or q) and kv_a, kv_b."""
    if not a.mla:
        return _inputs(a.hidden, 3, b)
    latent = _norm(a.kv_rank, b) + a.kv_rank * b.compute
    if b.compute == 4:
        latent += a.rope * 4  # the latent is a view of kv_a's output, which is kept whole
    query = _norm(a.q_rank, b) + a.q_rank * b.compute if a.q_rank else 0
    return _inputs(a.hidden, 2, b) + latent + query


def _moe(a: Architecture, b: Bytes) -> float:
    router = (a.hidden * 4 if b.compute == 2 and not b.copies else 0) + a.experts * 4 + 8 * a.top_k
    shared = (_inputs(a.hidden, 2, b) if a.shared else _inputs(a.hidden, 1, b)) + 4 * a.shared * b.compute
    return _norm(a.hidden, b) + router + _routed(a, b) + shared


def routed(a: Architecture, arithmetic: Arithmetic) -> float:
    """The share of a layer's routed experts in `saved`."""
    return _routed(a, KINDS[arithmetic])


def _routed(a: Architecture, b: Bytes) -> float:
    return a.top_k * ((2 * a.hidden + 4 * a.expert) * b.compute + 3 * 8 + 4)
