"""Which serving kernel takes which quantised weight: the rules of the runtimes as small pure functions.

A kernel multiplies (M, K) by (K, N). Tensor parallelism of T ranks leaves it K / T inputs (row parallel: o_proj,
down_proj), N / T outputs (column parallel) or all of both (replicated); gate and up, q / k / v, q_a and kv_a are one
matrix each. A rule gets such a `KernelShape` and returns None, or why it refuses. The rules were read in the sources
that `KERNELS` names; versions after those may be wider.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

MARLIN_GROUPS = (-1, 32, 64, 128)
MARLIN_N, MARLIN_K = 64, 128
MACHETE_GROUPS = (-1, 64, 128)
MACHETE_K, MACHETE_N = 64, 128


@dataclass(frozen=True)
class KernelShape:
    """One weight as a kernel sees it on one rank.

    k, n        inputs and outputs on the rank; of experts: of gate_up_proj (k = hidden, n = 2 I / T)
    full_k      inputs before tensor parallelism
    group_size  of the checkpoint; -1 for one scale a row
    experts     number of routed experts in one call, 0 for a dense layer; then `inner` is I / T, the K of down_proj
    """

    k: int
    n: int
    full_k: int
    group_size: int
    bits: int = 4
    symmetric: bool = True
    input_bits: int = 16
    dtype: str = "bfloat16"
    experts: int = 0
    inner: int = 0
    split: str = "whole"  # whole | ragged: a dimension is no multiple of T


Rule = Callable[[KernelShape], str | None]


def _weights_only(s: KernelShape, bits: tuple[int, ...] = (4, 8)) -> str | None:
    if s.split == "ragged":
        return f"{s.full_k} inputs or the outputs are not divided by the tensor parallelism"
    if s.bits not in bits:
        return f"{s.bits}-bit weights, the kernel has {' and '.join(map(str, bits))} bits"
    return f"{s.input_bits}-bit activations, the kernel has 16 bits" if s.input_bits != 16 else None


def _straddles(s: KernelShape, k: int) -> str | None:
    """A group of the checkpoint that would lie on two ranks."""
    return f"K {k} on a rank is no multiple of group {s.group_size}" if s.group_size > 0 and k % s.group_size else None


def marlin_format(s: KernelShape) -> str | None:
    """What Marlin has types for: uint4b8, uint8b128, and uint4 with zero points."""
    if not s.symmetric and s.bits != 4:
        return f"{s.bits}-bit weights with zero points, the kernel has zero points for 4 bits"
    if (reason := _weights_only(s)) is not None:
        return reason
    return f"group {s.group_size}, the kernel has {MARLIN_GROUPS}" if s.group_size not in MARLIN_GROUPS else None


def marlin(s: KernelShape) -> str | None:
    """N % 64 = 0, K % 128 = 0, K % group = 0."""
    if (reason := marlin_format(s)) is not None:
        return reason
    if s.n % MARLIN_N:
        return f"N {s.n} on a rank is no multiple of {MARLIN_N}"
    if s.k % MARLIN_K:
        return f"K {s.k} on a rank is no multiple of {MARLIN_K}"
    return _straddles(s, s.k)


def marlin_padded(s: KernelShape) -> str | None:
    """K % group = 0 on a rank; tiles are filled up with zeros at load."""
    return marlin_format(s) or _straddles(s, s.k)


def marlin_moe(s: KernelShape) -> str | None:
    """hidden % 128 = 0 and (I / T) % max(64, group) = 0."""
    if (reason := marlin_format(s)) is not None:
        return reason
    if s.k % 128:
        return f"hidden {s.k} is no multiple of 128"
    unit = max(64, s.group_size)
    return f"I / T {s.inner} is no multiple of max(64, group) = {unit}" if s.inner % unit else None


def marlin_moe_padded(s: KernelShape) -> str | None:
    """hidden % 128 = 0 and (I / T) % group = 0; the rest is filled up with zeros at load."""
    if (reason := marlin_format(s)) is not None:
        return reason
    return f"hidden {s.k} is no multiple of 128" if s.k % 128 else _straddles(s, s.inner)


def wna16_moe(s: KernelShape) -> str | None:
    """The slower Triton / CUDA-core kernel: whole groups, symmetric, per group."""
    if (reason := _weights_only(s)) is not None:
        return reason
    if not s.symmetric or s.group_size < 0:
        return "zero points" if not s.symmetric else "one scale a row, the kernel wants groups"
    return _straddles(s, s.k) or _straddles(s, s.inner)


def machete(s: KernelShape) -> str | None:
    """Hopper: K % 64 = 0, N % 128 = 0, groups of 64, 128 or a row."""
    if (reason := _weights_only(s)) is not None:
        return reason
    if s.group_size not in MACHETE_GROUPS:
        return f"group {s.group_size}, the kernel has {MACHETE_GROUPS}"
    if s.k % MACHETE_K:
        return f"K {s.k} on a rank is no multiple of {MACHETE_K}"
    return f"N {s.n} on a rank is no multiple of {MACHETE_N}" if s.n % MACHETE_N else _straddles(s, s.k)


def exllama(s: KernelShape) -> str | None:
    """fp16 activations, symmetric, K % group = 0, N % (32 / bits) = 0."""
    if (reason := _weights_only(s)) is not None:
        return reason
    if s.dtype != "float16":
        return f"served in {s.dtype}, the kernel has float16"
    if not s.symmetric or s.group_size < 0:
        return "zero points" if not s.symmetric else "one scale a row, the kernel wants groups"
    pack = 32 // s.bits
    return f"N {s.n} on a rank is no multiple of {pack}" if s.n % pack else _straddles(s, s.k)


def gptq(s: KernelShape) -> str | None:
    """The loader of GPTQ files: K % group = 0 and K, N % (32 / bits) = 0 on a rank."""
    if (reason := _weights_only(s)) is not None:
        return reason
    pack = 32 // s.bits
    for side, size in (("K", s.k), ("N", s.n)):
        if size % pack:
            return f"{side} {size} on a rank is no multiple of {pack}"
    return _straddles(s, s.k)


def awq(s: KernelShape) -> str | None:
    """AWQ files: 4 bits, groups, served in fp16, K % group = 0 and N % 8 = 0 on a rank."""
    if (reason := _weights_only(s, (4,))) is not None:
        return reason
    if s.group_size < 0:
        return "one scale a row, the format wants groups"
    if s.dtype != "float16":
        return f"served in {s.dtype}, the kernel has float16"
    return f"N {s.n} on a rank is no multiple of 8" if s.n % 8 else _straddles(s, s.k)


def awq_marlin(s: KernelShape) -> str | None:
    """AWQ files through Marlin, any 16-bit dtype: AWQ's layout and Marlin's tiles."""
    return _weights_only(s, (4,)) or marlin(s)


def awq_marlin_moe(s: KernelShape) -> str | None:
    return _weights_only(s, (4,)) or marlin_moe(s)


def gguf_q4_0(s: KernelShape) -> str | None:
    """Blocks of 32 with an fp16 scale; a wider group repeats its scale. Codes are kept. Not split over ranks."""
    if s.bits != 4 or not s.symmetric:
        return f"{s.bits}-bit weights" if s.bits != 4 else "zero points: Q4_1's minimum is fp16 and inexact"
    rows = (s.full_k, s.inner) if s.experts else (s.full_k,)
    for row in rows:
        if row % 32:
            return f"rows of {row} are no multiple of the block of 32"
    return f"group {s.group_size} is no multiple of the block of 32" if s.group_size > 0 and s.group_size % 32 else None


def gguf_q4_k(s: KernelShape) -> str | None:
    """Super-blocks of 256 with 6-bit scales: the trained codes are lost whatever the shape."""
    rows = (s.full_k, s.inner) if s.experts else (s.full_k,)
    for row in rows:
        if row % 256:
            return f"rows of {row} are no multiple of the super-block of 256 (llama.cpp falls back to Q5_0)"
    return "its 6-bit scales of blocks do not hold trained scales: it would quantise again; use Q4_0"


def openvino(s: KernelShape) -> str | None:
    """x86 CPU with AVX2: i4 or i8, or u4 with zero points, whole groups of at least 4, more than one output."""
    if s.bits not in (4, 8):
        return f"{s.bits}-bit weights, the plugin has 4 and 8 bits"
    if s.full_k % max(s.group_size, 1):
        return f"K {s.full_k} is no multiple of group {s.group_size}"
    if 0 < s.group_size < 4:
        return f"group {s.group_size} is below 4"
    return "one output row" if s.n == 1 else None


@dataclass(frozen=True)
class Kernel:
    """A runtime's kernel: its rule for dense layers, that for routed experts (None: it has no such kernel), whether
    tensor parallelism divides the weights, and where the rules were read."""

    runtime: str
    name: str
    dense: Rule | None
    experts: Rule | None
    parallel: bool
    source: str


_VLLM = "vllm-project/vllm"
_QUANT = "vllm/model_executor/layers/quantization"
_MIXED = "vllm/model_executor/kernels/linear/mixed_precision"
KERNELS = (
    Kernel("vLLM", "Marlin", marlin, marlin_moe, True,
           f"{_VLLM} 007d50058a06 {_QUANT}/utils/marlin_utils.py: verify_marlin_supports_shape, "
           "check_moe_marlin_supports_layer"),
    Kernel("vLLM", "Marlin with padding", marlin_padded, marlin_moe_padded, True,
           f"{_VLLM} 055e47c28003 {_MIXED}/marlin.py: can_implement; experts: 0043d6b52fda compressed_tensors_moe.py, "
           "allow_tile_padding"),
    Kernel("vLLM", "Machete", machete, None, True,
           f"{_VLLM} 055e47c28003 {_MIXED}/machete.py and {_QUANT}/utils/machete_utils.py"),
    Kernel("vLLM", "WNA16 MoE", None, wna16_moe, True,
           f"{_VLLM} 0072125a5057 {_QUANT}/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16.py"),
    Kernel("vLLM", "Exllama", exllama, None, True, f"{_VLLM} 055e47c28003 {_MIXED}/exllama.py: can_implement"),
    Kernel("vLLM", "GPTQ loader", gptq, None, True, f"{_VLLM} 02dd7b88eac9 {_QUANT}/gptq.py: create_weights"),
    Kernel("vLLM", "AWQ", awq, None, True, f"{_VLLM} 000796acdf1e {_QUANT}/awq.py: create_weights"),
    Kernel("vLLM", "AWQ Marlin", awq_marlin, awq_marlin_moe, True,
           f"{_VLLM} b2d85e9a6e9e {_MIXED}/awq_marlin.py: can_implement"),
    Kernel("SGLang", "Marlin", marlin, marlin_moe, True,
           "sgl-project/sglang 653d85493bdf python/sglang/srt/layers/quantization/marlin_utils.py"),
    Kernel("llama.cpp", "Q4_0", gguf_q4_0, gguf_q4_0, False,
           "ggml-org/llama.cpp 007dbbf3fd17 src/llama-quant.cpp: tensor_type_fallback; QK4_0 = 32"),
    Kernel("llama.cpp", "Q4_K", gguf_q4_k, gguf_q4_k, False,
           "ggml-org/llama.cpp 007dbbf3fd17 src/llama-quant.cpp: tensor_type_fallback; QK_K = 256"),
    Kernel("OpenVINO", "CPU", openvino, openvino, False,
           "openvinotoolkit/openvino 00103d876e4c src/plugins/intel_cpu/src/nodes/fullyconnected.cpp: "
           "isSupportedCompressedOperation"),
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A quantised matrix as runtimes fuse it, before tensor parallelism.

    cut     outputs | inputs | none: the dimension that tensor parallelism divides
    count   how many layers have it
    pieces  outputs of each of the fused projections; each is divided alone
    """

    name: str
    inputs: int
    pieces: tuple[int, ...]
    cut: str
    group_size: int
    bits: int = 4
    symmetric: bool = True
    input_bits: int = 16
    dtype: str = "bfloat16"
    experts: int = 0
    inner: int = 0
    count: int = 1

    def on_rank(self, tp: int) -> KernelShape:
        """The layer on one of `tp` ranks."""
        divided = {"outputs": self.pieces, "inputs": (self.inputs,), "none": ()}[self.cut]
        divided = (*divided, self.inner) if self.experts else divided
        k = self.inputs // tp if self.cut == "inputs" else self.inputs
        n = sum(p // tp for p in self.pieces) if self.cut == "outputs" else sum(self.pieces)
        return KernelShape(
            k, n, self.inputs, self.group_size, self.bits, self.symmetric, self.input_bits, self.dtype, self.experts,
            self.inner // tp, "ragged" if any(d % tp for d in divided) else "whole",
        )  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """A layer that a kernel does not take, and what to change."""

    layer: str
    reason: str
    remedy: str


def refusals(kernel: Kernel, layers: tuple[Layer, ...], tp: int) -> tuple[Refusal, ...]:
    """What `kernel` refuses among the layers it has a rule for; empty when it takes them all."""
    found = []
    for layer in layers:
        reason = reason_of(kernel, layer, tp)
        if reason is not None:
            found.append(Refusal(layer.name, reason, remedy(kernel, layer, tp)))
    return tuple(found)


def reason_of(kernel: Kernel, layer: Layer, tp: int) -> str | None:
    """Why `kernel` does not take `layer` at this tensor parallelism, or None."""
    rule = kernel.experts if layer.experts else kernel.dense
    if rule is None:
        return "no kernel for routed experts" if layer.experts else "no kernel for dense layers"
    return rule(layer.on_rank(tp if kernel.parallel else 1))


def remedy(kernel: Kernel, layer: Layer, tp: int) -> str:
    """The smallest change with which `kernel` takes `layer`: group size, dtype, tensor parallelism, or bf16."""
    if (kernel.experts if layer.experts else kernel.dense) is None:
        return "another kernel takes it"
    for t in (tp, *(t for t in (64, 32, 16, 8, 4, 2, 1) if t < tp and kernel.parallel)):
        for dtype in dict.fromkeys((layer.dtype, "float16")):
            for groups in ((layer.group_size,), tuple(g for g in (128, 64, 32) if g != layer.group_size)):
                fits = [g for g in groups if not reason_of(kernel, replace(layer, group_size=g, dtype=dtype), t)]
                if fits:
                    return _change(layer, t if t != tp else None, dtype, fits)
    return "keep it in bf16"


def _change(layer: Layer, tp: int | None, dtype: str, groups: list[int]) -> str:
    words = [f"tp {tp}"] if tp else []
    words += [f"serve in {dtype}"] if dtype != layer.dtype else []
    words += [f"group {' or '.join(map(str, groups))}"] if layer.group_size not in groups else []
    return ", ".join(words)
