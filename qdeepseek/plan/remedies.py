"""What would make a run fit that does not, one change at a time, the smallest value that fits of each kind.

Gradient checkpointing, chunks of experts (stage 3), smaller micro-batches, no teacher, more nodes, another strategy and
chunks with it. Where none is enough, checkpointing is switched on and they are tried again.
"""

from collections.abc import Iterator
from dataclasses import replace

from qdeepseek.plan.blocks import blocks_of
from qdeepseek.plan.memory import FUSED_LAYER, STAGES, Job, Stage, memory
from qdeepseek.plan.plan import Plan

CHECKPOINTING = "model.gradient_checkpointing=true"
MOST_NODES = 16  # times the nodes that were asked for


def chosen_stage(plan: Plan) -> Stage:
    """The row of the plan that the run's strategy is."""
    return next((stage for stage in STAGES if stage == plan.chosen), "ddp")


def remedies(plan: Plan) -> list[str]:
    """Changes to the command with which it fits; nothing where it fits as it is, or where none is found."""
    stage = chosen_stage(plan)
    if plan.fits(plan.memory[stage]):
        return []
    found = _changes(plan, stage)
    if plan.job.checkpointing:
        return found
    with_it = replace(plan, job=replace(plan.job, checkpointing=True))
    if plan.fits(with_it.memory[stage]):
        return [CHECKPOINTING, *found]
    return found or [f"{CHECKPOINTING} with {change}" for change in _changes(with_it, stage)]


def _changes(plan: Plan, stage: Stage) -> list[str]:
    found = [_first(plan, stage, options) for options in _single(plan, stage)]
    for other in STAGES:
        if other != stage and plan.fits(plan.memory[other]):
            alone = plan.chunked[0].chunks > 1 and other not in FUSED_LAYER
            found.append(f"strategy={other}" + (" with model.expert_chunks=1" if alone else ""))
        elif other != stage and other in FUSED_LAYER and (chunks := _first(plan, other, _chunks(plan))):
            found.append(f"strategy={other} with {chunks}")
    return [change for change in found if change]


def _single(plan: Plan, stage: Stage) -> Iterator[list[tuple[str, Job, int]]]:
    """Of each kind of change the values to try, as (words, job, chunks)."""
    job, chunks = plan.job, plan.chunked[0].chunks
    if stage in FUSED_LAYER:
        yield _chunks(plan)
    halves = [2**power for power in range(1, job.batch.bit_length()) if job.batch % 2**power == 0]
    yield [_split(job, parts, chunks) for parts in halves]
    if job.teacher:
        yield [("method.distill_weight=0", replace(job, teacher=False), chunks)]
    times = (2**power for power in range(1, MOST_NODES.bit_length()))
    yield [(f"nodes={n * job.nodes}", replace(job, nodes=n * job.nodes), chunks) for n in times]


def _split(job: Job, parts: int, chunks: int) -> tuple[str, Job, int]:
    """The same tokens a step in `parts` times as many micro-batches."""
    batch, accumulate = job.batch // parts, job.accumulate * parts
    words = f"data.batch_size={batch} trainer.accumulate={accumulate}"
    return words, replace(job, batch=batch, accumulate=accumulate), chunks


def _chunks(plan: Plan) -> list[tuple[str, Job, int]]:
    """More chunks than there are; none for a model that no stage streams."""
    experts, now = 0 if plan.whole else plan.architecture.experts, plan.chunked[0].chunks
    divisors = [n for n in range(now + 1, experts + 1) if experts % n == 0]
    return [(f"model.expert_chunks={n}", plan.job, n) for n in divisors]


def _first(plan: Plan, stage: Stage, options: list[tuple[str, Job, int]]) -> str | None:
    for words, job, chunks in options:
        blocks = blocks_of(plan.coverage, chunks if stage in FUSED_LAYER else 1)
        if plan.fits(memory(blocks, plan.architecture, job, stage)):
            return words
    return None
