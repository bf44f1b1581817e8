"""Rotates a model's activations without changing what it computes: outliers spread over all channels, same network.

For an orthogonal R, activations x become R x where every tensor axis that x is indexed by is multiplied by R too:
a reader W becomes W Rᵀ, a writer R W (its bias R b), an embedding row e becomes R e, so W Rᵀ R x = W x. An RMSNorm
commutes with R once its gamma is folded into the readers:  norm(x) ⊙ γ → W = (W diag γ) norm(x),  γ := 1.
Everything is merged into the weights: architecture, configuration and runtime stay the same, nothing runs online.

    stream   R of size hidden     embedding, lm_head, readers of a layer's two norms (the router too), o_proj, down_proj
    latent   MLA: q_a_proj → q_a_layernorm → q_b_proj, and kv_a_proj_with_mqa → kv_a_layernorm → kv_b_proj
             (the rope rows of kv_a_proj_with_mqa pass no norm and stay)
    value    one R of size v_head_dim a layer: value rows of every (key/value) head, input columns of o_proj

Sources: QuaRot (arXiv 2404.00456), SpinQuant's R1 and R2 (arXiv 2405.16406). For n = 2^k · m the map is
P (H₂ ⊗ … ⊗ C_m) diag(±1): a randomised Hadamard transform with, for the odd factor m, the Hartley matrix
C_ij = (cos 2πij/m + sin 2πij/m) / √m, also orthogonal and flat: no entry exceeds √(2/n).  fp64 throughout,
one rounding to the parameter's dtype. The input of down_proj, after SiLU(gate) · up, cannot be rotated offline.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdeepseek.surgery.prepare import quantized_tensors

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "llama", "qwen2")
PARTS = ("stream", "latent", "value")
STREAM_READERS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")

Move = Callable[[Tensor], Tensor]  # changes an fp64 copy of a parameter, or of one expert of it


@dataclass(frozen=True)
class RotationReport:
    """What `rotate` did.

    sizes    size of each rotated space: hidden, q_latent, kv_latent, value (absent when not rotated)
    folded   names of the norm weights that are 1 now
    rotated  parameter name -> the spaces it was rotated in, in order; "gamma" where a norm was folded into it
    """

    seed: int
    sizes: dict[str, int]
    folded: tuple[str, ...]
    rotated: dict[str, tuple[str, ...]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Rotation:
    """A seeded random orthogonal map of R^n in O(n log n): signs, Hadamard for 2^k, Hartley for the odd factor."""

    def __init__(self, n: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.n = n
        self.signs_N = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
        odd = n // (n & -n)
        sizes = [2] * (n & -n).bit_length()
        self.factors = [hartley(size) for size in [*sizes[1:], odd] if size > 1]

    def apply(self, x: Tensor, dim: int) -> Tensor:
        """R along dimension `dim` of an fp64 tensor; a new tensor of the same shape."""
        y = x.movedim(dim, -1)
        shape = y.shape
        y = (y * self.signs_N.to(x.device)).reshape(-1, self.n)
        for factor in self.factors:  # the last index is transformed and moved to the front; a permutation remains
            y = y.reshape(len(y), -1, len(factor)) @ factor.to(x.device)
            y = y.transpose(1, 2).reshape(len(y), self.n)
        return y.reshape(shape).movedim(-1, dim)


def hartley(n: int) -> Tensor:
    """The (n, n) orthonormal Hartley matrix, symmetric, fp64; for n = 2 it is the Hadamard matrix."""
    i_N = torch.arange(n)
    angle_NN = (i_N[:, None] * i_N % n).double() * (2 * math.pi / n)
    return (angle_NN.cos() + angle_NN.sin()) / math.sqrt(n)


@torch.no_grad()
def rotate(model: nn.Module, *, seed: int = 0, parts: Iterable[str] = PARTS) -> RotationReport:
    """Folds every RMSNorm into its readers and rotates the spaces `parts`, in place; before `prepare`.

    seed   of the random signs; each space and each layer has its own
    parts  any of stream, latent, value; with none of them only norms are folded

    Logits are unchanged up to rounding. Raises ValueError, before anything is changed, for a model of another family
    or with parameters this module does not know, with tied embeddings, prepared (quantised), without weights, or
    rotated already.
    """
    parts = frozenset(parts)
    if not parts <= set(PARTS):
        raise ValueError(f"rotate: unknown parts {sorted(parts - set(PARTS))}; use any of {', '.join(PARTS)}")
    check_rotatable(model)
    moves = _Moves(model, seed, parts)
    _collect(model, moves)
    moves.check_complete()
    for name, steps in moves.steps.items():
        _rewrite(model.get_parameter(name), [move for _, move in steps])
    for name in moves.norms:
        model.get_parameter(name).fill_(1.0)
    model.qdeepseek_rotated = True  # type: ignore[assignment]
    rotated = {name: tuple(label for label, _ in steps) for name, steps in moves.steps.items()}
    return RotationReport(seed, moves.sizes, tuple(moves.norms), rotated)


def check_rotatable(model: nn.Module) -> None:
    """Raises ValueError naming what keeps `model` from being rotated: family, tied or quantised weights, no data."""
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in MODEL_TYPES:
        raise ValueError(f"rotate does not know the family {kind!r}; it rotates {', '.join(MODEL_TYPES)}")
    if getattr(model, "qdeepseek_rotated", False):
        raise ValueError("the model is rotated already; load it afresh to rotate it with another seed")
    quantised = next(quantized_tensors(model), None)
    if quantised is not None:
        raise ValueError(f"{quantised.name} is quantised; rotate before prepare, or call restore(model) first")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output layer; rotate a causal language model")
    if config.tie_word_embeddings or head.weight is embedding.weight:
        raise ValueError(
            "the embedding is tied to lm_head, and the final norm can be folded into only one of them; "
            "call qdeepseek.surgery.untie(model) first"
        )
    for name, p in model.named_parameters():
        if p.device.type == "meta" or not p.is_floating_point() or p.element_size() < 2:
            raise ValueError(f"{name} is {p.dtype} on {p.device}; rotate needs loaded weights of at least 16 bits")


class _Moves:
    """Collects, parameter by parameter, what is to be done, so that each is rounded once and errors come first."""

    def __init__(self, model: nn.Module, seed: int, parts: frozenset[str]) -> None:
        self.seed, self.parts = seed, parts
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.steps: dict[str, list[tuple[str, Move]]] = {}
        self.norms: list[str] = []
        self.known: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.spaces = 0

    def space(self, part: str, label: str, n: int) -> tuple[str, Rotation | None]:
        """The next rotation, of size n; none where `part` is not asked for. Seeds do not depend on `parts`."""
        self.spaces += 1
        if part not in self.parts:
            return label, None
        self.sizes[label] = n
        return label, Rotation(n, self.seed * 1_000_003 + self.spaces)

    def add(self, parameter: Tensor, label: str, move: Move) -> None:
        self.steps.setdefault(self.know(parameter), []).append((label, move))

    def know(self, parameter: Tensor) -> str:
        name = self.names[id(parameter)]
        self.known.add(name)
        return name

    def fold(self, norm: nn.Module, readers: Iterable[Tensor]) -> None:
        """gamma onto the last axis of every reader."""
        weight: Any = norm.weight
        self.norms.append(self.know(weight))
        gamma = weight.detach().double().clone()
        for reader in readers:
            self.add(reader, "gamma", lambda w: w * gamma.to(w.device))

    def turn(
        self, parameter: Tensor | None, space: tuple[str, Rotation | None], dim: int, view: Move | None = None
    ) -> None:
        """R along `dim` of the parameter, or of the part of it that `view` returns."""
        label, rotation = space
        if parameter is None:
            return
        if rotation is None:
            self.know(parameter)
            return

        def move(w: Tensor) -> Tensor:
            part = w if view is None else view(w)
            part.copy_(rotation.apply(part, dim))
            return w

        self.add(parameter, label, move)

    def check_complete(self) -> None:
        unknown = sorted(set(self.names.values()) - self.known)
        if unknown:
            raise ValueError(
                f"rotate does not know what reads or writes {unknown[0]} ({len(unknown)} such parameters), so the "
                f"rotated model could differ; merge adapters and remove added modules first"
            )


def _rewrite(parameter: Tensor, moves: list[Move]) -> None:
    """Applies the moves to an fp64 copy and rounds once; 3-D experts one at a time to bound memory."""
    for w in parameter if parameter.ndim == 3 else (parameter,):
        new = w.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        for move in moves:
            new = move(new)
        w.copy_(new)


def _collect(model: Any, moves: _Moves) -> None:
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    stream = moves.space("stream", "hidden", model.config.hidden_size)
    moves.turn(decoder.embed_tokens.weight, stream, -1)
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _read(moves, layer.input_layernorm, stream, _linears(attention, STREAM_READERS))
        (_latent_attention if hasattr(attention, "kv_b_proj") else _grouped_attention)(moves, attention, model.config)
        _write(moves, attention.o_proj, stream)
        readers, writers = _mlp(mlp)
        _read(moves, layer.post_attention_layernorm, stream, readers)
        for writer in writers:
            _write(moves, writer, stream)
    _read(moves, decoder.norm, stream, [head])


def _linears(module: nn.Module, names: Iterable[str]) -> list[Any]:
    found = (getattr(module, name, None) for name in names)
    return [linear for linear in found if linear is not None]


def _mlp(mlp: Any) -> tuple[list[Any], list[Any]]:
    """Readers and writers of the stream: Linear, router, or (fused experts) bare 3-D parameters."""
    if not hasattr(mlp, "experts"):
        return [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]
    readers, writers = [mlp.gate, mlp.experts.gate_up_proj], [mlp.experts.down_proj]
    if getattr(mlp, "shared_experts", None) is not None:
        shared_readers, shared_writers = _mlp(mlp.shared_experts)
        readers, writers = readers + shared_readers, writers + shared_writers
    return readers, writers


def _tensors(owner: Any) -> tuple[Tensor, Tensor | None]:
    return (owner, None) if isinstance(owner, Tensor) else (owner.weight, getattr(owner, "bias", None))


def _read(moves: _Moves, norm: nn.Module, space: tuple[str, Rotation | None], readers: Iterable[Any]) -> None:
    """Readers of norm(x): gamma folded, input columns rotated; their biases stay."""
    pairs = [_tensors(reader) for reader in readers]
    moves.fold(norm, [weight for weight, _ in pairs])
    for weight, bias in pairs:
        moves.turn(weight, space, -1)
        if bias is not None:
            moves.know(bias)


def _write(moves: _Moves, writer: Any, space: tuple[str, Rotation | None], view: Move | None = None) -> None:
    """Output rows and bias rotated; `view` cuts the rows concerned out of either. dim 0: an expert comes alone."""
    for tensor in _tensors(writer):
        moves.turn(tensor, space, 0, view)


def _latent_attention(moves: _Moves, attention: Any, config: Any) -> None:
    """MLA. kv_b_proj rows are, head by head, [nope of the key; value]."""
    rank, value = config.kv_lora_rank, config.v_head_dim
    if getattr(attention, "q_a_proj", None) is not None:
        q_latent = moves.space("latent", "q_latent", config.q_lora_rank)
        _write(moves, attention.q_a_proj, q_latent)
        _read(moves, attention.q_a_layernorm, q_latent, [attention.q_b_proj])
    kv_latent = moves.space("latent", "kv_latent", rank)
    _write(moves, attention.kv_a_proj_with_mqa, kv_latent, lambda w: w[:rank])
    _read(moves, attention.kv_a_layernorm, kv_latent, [attention.kv_b_proj])
    rows = config.qk_nope_head_dim + value
    _value_heads(moves, attention.kv_b_proj, attention.o_proj, value, rows)


def _grouped_attention(moves: _Moves, attention: Any, config: Any) -> None:
    """MHA / GQA: one map for all heads of the layer, so query heads that share a value head agree."""
    _value_heads(moves, attention.v_proj, attention.o_proj, attention.head_dim, attention.head_dim)


def _value_heads(moves: _Moves, values: Any, out: Any, size: int, rows: int) -> None:
    """Last `size` of every `rows` rows of `values`, and every `size` columns of `out`, rotated."""
    space = moves.space("value", "value", size)
    for tensor in _tensors(values):
        moves.turn(tensor, space, 1, lambda w: w.view(-1, rows, *w.shape[1:])[:, rows - size :])
    moves.turn(out.weight, space, -1, lambda w: w.view(len(w), -1, size))
