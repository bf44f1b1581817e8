"""Seconds of one optimizer step on one GPU: operations, fake-quant, communication.

T tokens of a micro-batch on one rank, a micro-batches a step, n nodes of g GPUs, N = n g.

    matrices     2 T M operations forward, twice that backward, once more forward with gradient checkpointing, and a
                 teacher's forward;  M: parameters that a token meets (top_k / E of the routed experts, no embedding)
    attention    2 T h (d_qk + d_v) L / 2 forward (causal), the backward twice
    fake-quant   bytes that element-wise passes read and write in the GPU's memory, for every quantised parameter, on
                 every rank and in every forward and backward: data parallelism does not divide them
    collective   of B bytes over all ranks: max(B (N-1)/N / link, B (n-1)/n / (g network)), since each GPU takes B
                 through its link and each node through its g ports; an all-reduce is two
Routed experts in chunks (at stage 3) are computed, fake-quantised and gathered once more forward.
Communication of a step, in units of the parameters' bytes p P, times a where it is done for every micro-batch:
    ddp 2    zero1 1 + 1    zero2 a + 1    zero3 and zero3_offload a (1 gradients + 2 weights + 1 with checkpointing)
The truth lies between max(computing, communicating) and their sum: with full overlap, and with none.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qdeepseek.plan.architecture import Architecture
from qdeepseek.plan.blocks import Block, total
from qdeepseek.plan.hardware import Hardware
from qdeepseek.plan.memory import FUSED_LAYER, Job, Stage

# passes over a weight in grid.fake_quantize: divide, round, clamp, multiply, round to the served dtype, each 4 bytes in
# and 4 out; in lsq.gradients: divide, clamp, round, clamp, compare, multiply, subtract, multiply, sum
FORWARD_PASSES, BACKWARD_PASSES, PASS_BYTES = 5, 9, 8


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on, and the bytes that one rank sends and receives in it."""

    matrices: float
    fake_quant: float
    communication: float
    host: float
    bytes: float
    tokens: int

    @property
    def computing(self) -> float:
        return self.matrices + self.fake_quant + self.host

    @property
    def overlapped(self) -> float:
        return max(self.computing, self.communication)

    @property
    def serial(self) -> float:
        return self.computing + self.communication

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "overlapped": self.overlapped, "serial": self.serial}


def step_time(blocks: Sequence[Block], a: Architecture, job: Job, hardware: Hardware, stage: Stage) -> StepTime:
    """One optimizer step of `job` at `stage`."""
    sent = traffic(blocks, job, stage)
    speed = hardware.bandwidth * hardware.efficiency
    return StepTime(
        matrices=_matrix_seconds(blocks, a, job, hardware),
        fake_quant=job.accumulate * fake_quant_bytes(blocks, job) / speed,
        communication=collective_seconds(sent, job, hardware),
        host=_host_seconds(blocks, job, hardware) if stage == "zero3_offload" else 0.0,
        bytes=sent,
        tokens=job.tokens * job.ranks * job.accumulate,
    )  # fmt: skip


def active_parameters(blocks: Sequence[Block], a: Architecture) -> float:
    """Parameters that one token meets, without the embedding table."""
    rest = sum(b.parameters - b.routed for b in blocks if b.name != "embedding")
    return rest + (total(blocks, "routed") * a.top_k / a.experts if a.experts else 0)


def operations(blocks: Sequence[Block], a: Architecture, job: Job) -> float:
    """Operations of one micro-batch on one rank."""
    passes = 3 + (1 if job.checkpointing else 0) + (1 if job.teacher else 0)
    attention = len(a.kinds) * a.heads * (a.query + a.value) * job.length / 2
    again = sum(b.routed for b in blocks if b.chunked) * a.top_k / max(a.experts, 1)
    return 2 * job.tokens * (passes * (active_parameters(blocks, a) + attention) + again)


def _matrix_seconds(blocks: Sequence[Block], a: Architecture, job: Job, hardware: Hardware) -> float:
    rate = hardware.fp32_flops if job.arithmetic == "full" else hardware.flops
    return job.accumulate * operations(blocks, a, job) / (rate * hardware.mfu)


def fake_quant_bytes(blocks: Sequence[Block], job: Job) -> float:
    """Of one micro-batch; with the cache the forward's passes are shared by the micro-batches of a step."""
    quantised = total(blocks, "quantised")
    counted = job.cached or (job.recompute and not job.checkpointing)  # `forwards` has a chunk's second forward in it
    again = 0 if counted else sum(b.routed_quantised for b in blocks if b.chunked)
    learned = quantised if total(blocks, "scales") else 0
    forwards = 1 / job.accumulate if job.cached else 2 if job.checkpointing or job.recompute else 1
    return PASS_BYTES * (FORWARD_PASSES * (forwards * quantised + again) + BACKWARD_PASSES * learned)


def traffic(blocks: Sequence[Block], job: Job, stage: Stage) -> float:
    """Bytes that collectives of one step carry; a rank sends (N - 1) / N of them."""
    size = job.parameter_bytes * total(blocks, "parameters")
    if job.ranks == 1:
        return 0.0
    if stage in FUSED_LAYER:
        weights = 2 + (1 if job.checkpointing else 0) + (1 if job.teacher else 0)
        again = job.parameter_bytes * sum(b.routed for b in blocks if b.chunked)
        return job.accumulate * (size * (1 + weights) + again)
    return size * {"ddp": 2, "zero1": 2, "zero2": job.accumulate + 1}[stage]


def collective_seconds(size: float, job: Job, hardware: Hardware) -> float:
    """Of collectives that carry `size` bytes over all ranks."""
    inside = size * (job.ranks - 1) / job.ranks / hardware.link
    across = size * (job.nodes - 1) / job.nodes / (job.gpus * hardware.network)
    return max(inside, across) / hardware.efficiency


def _host_seconds(blocks: Sequence[Block], job: Job, hardware: Hardware) -> float:
    """Offload: each rank's part over its host link for every use, and the optimizer's pass over host memory.

    Adam reads gradient, master weight and two moments in fp32, and writes three of them and the weight: 28 + p bytes.
    """
    part = job.parameter_bytes * total(blocks, "parameters") / job.ranks
    again = job.parameter_bytes * sum(b.routed for b in blocks if b.chunked) / job.ranks
    uses = job.accumulate * (3 + (1 if job.checkpointing else 0) + (1 if job.teacher else 0)) + 1
    optimizer = (28 + job.parameter_bytes) * total(blocks, "parameters") / job.nodes / hardware.host_bandwidth
    moved = part * uses + job.accumulate * again
    return (moved / hardware.host_link + optimizer) / hardware.efficiency
