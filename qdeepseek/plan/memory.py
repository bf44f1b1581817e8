"""Bytes on one GPU at the worst moment of a training step, by ZeRO stage, and in the memory of its host.

P parameters, Q of them fake-quantised, N ranks, p bytes of a parameter in training, S learned scales (fp32 always).
Every block b has parameters P_b, saved activations A_b and fake-quantised copies W_b = p·Q_b.

                   weights    gradients    optimizer           communication
    ddp            p P        p P          2 p P               p P (buckets, N > 1)
    zero1          p P        p P          12 P / N            2 p bucket
    zero2          p P        p P / N      12 P / N            2 p bucket
    zero3          p P / N    p P / N      12 or 8 P / N       p bucket, p live, and 2 p G_b: what is gathered at once
    zero3_offload  0          0            0                   the same; on the host (p + 16) P / nodes

12: fp32 master weights 4, Adam's two moments 8; at stage 3 fp32 weights are their own master (zero.share_masters).
Scales take 4 S (weight), 4 S (gradient), 8 S (moments), and from stage 1 on 8 S more (master, gradient of the step),
divided by N as above. p is 4 unless the weights are bf16. The step walks forward and backward over the blocks;
the worst moment is the maximum of
    end of forward   Σ A_b + Σ W_b + head          (head: one chunk of logits, its log-softmax and its gradient)
    backward of b    Σ_{c ≤ b} (A_c + W_c) + gradients of c > b + workspace of b
    optimizer step   the fp32 gradient 4 P / N (at stage 3 of one sub-group of 10⁹ elements); nothing is gathered
With gradient checkpointing A_b is the input of b alone, W_b is 0, and the workspace holds the recomputed block.
G_b is P_b, or with routed experts in chunks (at stage 3) the rest of the block and one chunk. A chunk is always
recomputed: of the experts' A_b and W_b the workspace holds one chunk's.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from qdeepseek.plan.activations import KINDS, Arithmetic, routed, saved
from qdeepseek.plan.architecture import Architecture
from qdeepseek.plan.blocks import Block, total
from qdeepseek.quant.grid import PIECE

Stage = Literal["ddp", "zero1", "zero2", "zero3", "zero3_offload"]
STAGES: tuple[Stage, ...] = ("ddp", "zero1", "zero2", "zero3", "zero3_offload")
FUSED_LAYER = ("zero3", "zero3_offload")
LOGIT_BYTES, TEACHER_LOGIT_BYTES = 12, 24  # fp32 tensors of one chunk alive at once: 3, with a teacher 6
# bytes an element of one piece of a weight (quant/grid.py), beside w and w_hat
FORWARD_TEMPORARY = {2: 4, 4: 2}  # by bytes of a weight
PIECE_TEMPORARY = 6  # the same of a weight of several pieces: its levels are not made in place of w_hat
BACKWARD_TEMPORARY = 12  # three fp32 tensors: w / s, its rounding, its clamped rounding


@dataclass(frozen=True)
class Job:
    """What memory and time of a step depend on beside the model.

    precision   trainer.precision; weight_bytes that of model.dtype
    cached      method.cache, recompute: method.recompute, teacher: method.distill_weight > 0
    max_logits  elements of one chunk of logits
    bucket      elements of a communication bucket, live the most that ZeRO-3 keeps gathered beyond one block
    sub_group   elements of its part that ZeRO-3 steps at a time
    """

    nodes: int = 1
    gpus: int = 1
    batch: int = 1
    length: int = 4096
    accumulate: int = 1
    precision: str = "bf16-mixed"
    weight_bytes: int = 4
    checkpointing: bool = True
    cached: bool = False
    recompute: bool = False
    teacher: bool = True
    fused_attention: bool = True
    max_logits: int = 2**25
    bucket: int = 200_000_000
    live: int = 1_000_000_000
    sub_group: int = 1_000_000_000

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "batch", "length", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.precision not in ("32-true", "bf16-mixed", "bf16-true"):
            raise ValueError(f"trainer.precision {self.precision} has no plan; use 32-true, bf16-mixed or bf16-true")

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one rank."""
        return self.batch * self.length

    @property
    def arithmetic(self) -> Arithmetic:
        """`mixed` is autocast over fp32 weights, which DeepSpeed does here too (train/zero.py)."""
        if self.weight_bytes == 2 or self.precision == "bf16-true":
            return "bf16"
        return "full" if self.precision == "32-true" else "mixed"

    @property
    def parameter_bytes(self) -> int:
        return 2 if self.arithmetic == "bf16" else 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU by what they are, at the worst moment, and `host` bytes in the memory of one node."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    scales: float = 0
    teacher: float = 0
    communication: float = 0
    step: float = 0
    gathered: float = 0
    activations: float = 0
    fake_quant: float = 0
    temporary: float = 0
    head: float = 0
    host: float = 0
    moment: str = ""

    @property
    def total(self) -> float:
        return sum(v for k, v in asdict(self).items() if k not in ("host", "moment"))

    @property
    def model_states(self) -> float:
        """What DeepSpeed's estimators count: weights, gradients, optimizer, and ZeRO-3's gathered block."""
        return self.weights + self.gradients + self.optimizer + self.step + self.gathered

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def memory(blocks: Sequence[Block], a: Architecture, job: Job, stage: Stage) -> Memory:
    """The worst moment of a step at `stage`."""
    return max(moments(blocks, a, job, stage), key=lambda m: m.total)


def moments(blocks: Sequence[Block], a: Architecture, job: Job, stage: Stage) -> list[Memory]:
    """The end of the forward, the backward of every block, and the optimizer's step, in this order of the list."""
    fixed, whole = _fixed(blocks, job, stage), _gathered(blocks, job, stage)
    working = [_end_of_forward(blocks, a, job)]
    working += [_backward(blocks, a, job, stage, index) for index in range(len(blocks))]
    step = Memory(step=_gradient_of_the_step(blocks, job, stage), moment="optimizer step")
    return [_sum(fixed, replace(moment, gathered=whole)) for moment in working] + [_sum(fixed, step)]


def states(blocks: Sequence[Block], job: Job, stage: Stage) -> Memory:
    """What DeepSpeed's estimators add up, though it is not all there at one moment."""
    step = _gradient_of_the_step(blocks, job, stage)
    return replace(_fixed(blocks, job, stage), gathered=_gathered(blocks, job, stage), step=step)


def _sum(fixed: Memory, moment: Memory) -> Memory:
    return replace(moment, **{k: getattr(fixed, k) + getattr(moment, k) for k in asdict(fixed) if k != "moment"})


def _fixed(blocks: Sequence[Block], job: Job, stage: Stage) -> Memory:
    """What is there at every moment."""
    p, n = job.parameter_bytes, job.ranks
    every, fp32, scales = (total(blocks, k) for k in ("parameters", "fp32", "scales"))
    weights = p * every + (4 - p) * fp32
    memory = Memory(
        weights=weights,
        optimizer=2 * weights if stage == "ddp" else 12 * every / n,
        scales=16 * scales if stage == "ddp" else (4 + 20 / n) * scales,
        teacher=weights if job.teacher else 0,
        fake_quant=p * total(blocks, "quantised") if job.cached else 0,
        gradients=weights if _whole_gradients(job, stage) else 0,
    )
    bucket = p * min(job.bucket, every)
    if stage == "ddp":
        return replace(memory, communication=weights if n > 1 else 0)
    if stage == "zero1":
        return replace(memory, communication=2 * bucket)
    if stage == "zero2":
        return replace(memory, gradients=weights / n, communication=2 * bucket)
    largest = max(blocks, key=lambda b: b.gathered)
    live = p * max(0, min(job.live, every) - largest.gathered)
    partitioned = replace(
        memory, weights=weights / n, gradients=weights / n, teacher=memory.teacher / n, scales=24 * scales / n,
        communication=bucket + live,
    )  # fmt: skip
    if job.parameter_bytes == 4:
        partitioned = replace(partitioned, optimizer=8 * every / n)
    if stage == "zero3":
        return partitioned
    host = ((p + 16) * every + 20 * scales + memory.teacher) / job.nodes
    return replace(partitioned, weights=0, gradients=0, optimizer=0, teacher=0, scales=0, host=host)


def _gathered(blocks: Sequence[Block], job: Job, stage: Stage) -> float:
    """The largest block, or chunk and the rest of its block, and its gradient."""
    if stage not in FUSED_LAYER:
        return 0
    largest = max(blocks, key=lambda b: b.gathered)
    return 2 * (job.parameter_bytes * largest.gathered + 4 * largest.gathered_scales)


def _gradient_of_the_step(blocks: Sequence[Block], job: Job, stage: Stage) -> float:
    """The fp32 gradient that the optimizer takes: of all of the part, at stage 3 of one sub-group of it."""
    part = total(blocks, "parameters") / job.ranks
    return {"ddp": 0, "zero1": 4 * part, "zero2": 4 * part, "zero3": 4 * min(part, job.sub_group)}.get(stage, 0)


def _whole_gradients(job: Job, stage: Stage) -> bool:
    """Whether whole gradients outlive a backward: under accumulation, or because DeepSpeed keeps them at stage 1."""
    return stage == "zero1" or (stage == "ddp" and job.accumulate > 1)


def _end_of_forward(blocks: Sequence[Block], a: Architecture, job: Job) -> Memory:
    held = _held(blocks, a, job, len(blocks))
    chunk = min(job.tokens, max(1, job.max_logits // a.vocab)) * a.vocab
    return replace(held, head=chunk * (TEACHER_LOGIT_BYTES if job.teacher else LOGIT_BYTES), moment="loss")


def _backward(blocks: Sequence[Block], a: Architecture, job: Job, stage: Stage, index: int) -> Memory:
    block, p = blocks[index], job.parameter_bytes
    held = _held(blocks, a, job, index + 1)
    later = 0.0
    if stage == "ddp" and not _whole_gradients(job, stage):
        later = p * sum(b.parameters for b in blocks[index:])
    again = _saved(block, a, job) if job.checkpointing else 0
    copies = _copies(block, job) if job.checkpointing else 0
    if block.chunked:
        again += job.tokens * routed(a, job.arithmetic)
        copies += _chunk_copies(block, job)
    temporary: float = BACKWARD_TEMPORARY * min(block.learned, PIECE)
    if _whole_gradients(job, stage):
        temporary += p * block.largest_parameter
    rebuilt = KINDS[job.arithmetic].compute * block.largest if _rebuilds(job) else 0
    temporary = max(temporary, _forward_temporary(block, job)) + rebuilt
    flowing = _flowing(block, a, job)
    return replace(
        held, gradients=later, activations=held.activations + flowing + again, fake_quant=held.fake_quant + copies,
        temporary=temporary, moment=f"backward of {block.name}",
    )  # fmt: skip


def _forward_temporary(block: Block, job: Job) -> float:
    """Of fake-quant, and under autocast the fp32 w_hat of which autograd keeps a bf16 cast."""
    cut = PIECE_TEMPORARY * PIECE if block.largest > PIECE else FORWARD_TEMPORARY[job.parameter_bytes] * block.largest
    return max(cut, 4 * block.largest) if job.arithmetic == "mixed" else cut


def _held(blocks: Sequence[Block], a: Architecture, job: Job, count: int) -> Memory:
    """Activations and fake-quantised copies of the first `count` blocks."""
    stream = job.tokens * a.hidden * KINDS[job.arithmetic].stream
    acts = copies = 0.0
    for block in blocks[:count]:
        if job.checkpointing:
            acts += stream if block.name.startswith("layer") else 0
        else:
            acts += _saved(block, a, job)
            copies += _copies(block, job)
    return Memory(activations=acts, fake_quant=copies)


def _saved(block: Block, a: Architecture, job: Job) -> float:
    arithmetic = job.arithmetic
    if block.name.startswith("layer"):
        kind = a.kinds[int(block.name.split()[1])]
        every = saved(a, kind, arithmetic, job.length, job.fused_attention)
        return job.tokens * (every - (routed(a, arithmetic) if block.chunked else 0))
    b = KINDS[arithmetic]
    return job.tokens * a.hidden * (4 + b.normalised + b.compute) if block.name == "head" else 0


def _copies(block: Block, job: Job) -> float:
    """Fake-quantised weights that autograd keeps for the backward; under autocast bf16 copies of all weights.

    method.recompute keeps none, except in a block that gradient checkpointing computes again.
    """
    kept, quantised = block.kept, block.quantised
    if block.chunked:
        kept, quantised = kept - block.routed_kept, quantised - block.routed_quantised
    return _copied(kept, quantised, job, _rebuilds(job))


def _chunk_copies(block: Block, job: Job) -> float:
    """Of one chunk, which its own checkpoint computes again."""
    return _copied(block.routed_kept / block.chunks, block.routed_quantised / block.chunks, job, False)


def _copied(kept: float, quantised: float, job: Job, rebuilt: bool) -> float:
    if job.arithmetic == "mixed":
        return 2 * (kept + (0 if rebuilt else quantised))
    return 0 if job.cached or rebuilt else job.parameter_bytes * quantised


def _rebuilds(job: Job) -> bool:
    """Whether the backward computes w_hat again, one weight at a time."""
    return job.recompute and not (job.cached or job.checkpointing)


def _flowing(block: Block, a: Architecture, job: Job) -> float:
    """Gradients of activations alive at once in the backward of a block: twice its widest tensor and the stream."""
    if not block.name.startswith("layer"):
        return 0
    b = KINDS[job.arithmetic]
    widths = [a.heads * a.query, a.hidden]
    if a.kinds[int(block.name.split()[1])] == "moe":
        widths += [a.top_k * max(2 * a.expert, a.hidden)]
    else:
        widths += [2 * a.dense]
    attention = 0 if job.fused_attention else 2 * a.heads * job.length * 4
    return job.tokens * max(2 * max(widths) * b.compute + a.hidden * b.stream, attention)
