"""A plan as text for a terminal."""

from collections.abc import Sequence

from qdeepseek.plan.memory import STAGES, Memory
from qdeepseek.plan.plan import Plan
from qdeepseek.plan.remedies import chosen_stage, remedies
from qdeepseek.surgery.runtimes import KERNELS, Refusal

PARTS = (
    ("weights", "weights"), ("gradients", "gradients"), ("optimizer", "optimizer"), ("scales", "learned scales"),
    ("teacher", "teacher"), ("communication", "communication"), ("step", "gradient of the step"),
    ("gathered", "gathered block"), ("activations", "activations"), ("fake_quant", "fake-quantised copies"),
    ("temporary", "fake-quant temporary"), ("head", "logits"),
)  # fmt: skip


def text(plan: Plan) -> str:
    """All of it, in the order in which it is decided."""
    parts = [_head(plan), plan.coverage.table(), _memory(plan), _time(plan), _export(plan), _serving(plan)]
    return "\n\n".join(part for part in parts if part)


def gigabytes(value: float) -> str:
    """In 10⁹ bytes, three digits."""
    return f"{value / 1e9:,.1f}" if value >= 1e10 else f"{value / 1e9:.2f}"


def _head(plan: Plan) -> str:
    job, hardware = plan.job, plan.hardware
    lines = [
        f"{plan.model} ({plan.source}): {plan.coverage.parameters:,} parameters, {plan.active:,.0f} met by a token",
        f"{job.nodes} × {job.gpus} {hardware.name}, strategy {plan.chosen}, {job.precision}, "
        f"{job.batch} × {job.length} tokens a rank and micro-batch, {job.accumulate} micro-batches a step, "
        f"gradient checkpointing {'on' if job.checkpointing else 'off'}, teacher {'on' if job.teacher else 'off'}"
        + (f", routed experts in {plan.chunked[0].chunks} chunks at stage 3" if plan.architecture.experts else ""),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    hardware = plan.hardware
    rows = [["GB on one GPU", *STAGES]]
    for key, name in PARTS:
        values = [getattr(plan.memory[stage], key) for stage in STAGES]
        if any(values):
            rows.append([name, *(gigabytes(v) for v in values)])
    rows.append(["total", *(gigabytes(plan.memory[s].total) for s in STAGES)])
    rows.append(["fits", *(_fit(plan, plan.memory[s]) for s in STAGES)])
    others = {stage: plan.other_checkpointing(stage) for stage in STAGES}
    word = "without" if plan.job.checkpointing else "with"
    rows.append([f"total {word} checkpointing", *(gigabytes(others[s].total) for s in STAGES)])
    rows.append([f"fits {word} checkpointing", *(_fit(plan, others[s]) for s in STAGES)])
    rows.append(["host, GB on one node", *(gigabytes(plan.memory[s].host) for s in STAGES)])
    rows.append(["worst moment", *(plan.memory[s].moment for s in STAGES)])
    limit = (
        f"A GPU has {gigabytes(hardware.memory)} GB, of which CUDA, NCCL and fragments are taken to need "
        f"{gigabytes(hardware.reserve)}; a node's host {gigabytes(hardware.host_memory)}."
    )
    return "\n".join([columns(rows), limit, *_advice(plan)])


def _advice(plan: Plan) -> list[str]:
    stage = chosen_stage(plan)
    if plan.fits(plan.memory[stage]):
        return []
    found = remedies(plan)
    if not found:
        return [f"{stage} does not fit, and no single change makes it: take another model, or train adapters alone."]
    return [f"{stage} does not fit. What would: {'; '.join(found)}."]


def _fit(plan: Plan, memory: Memory) -> str:
    return "yes" if plan.fits(memory) else "no"


def _time(plan: Plan) -> str:
    rows = [["seconds of a step", *STAGES]]
    for key, name in (
        ("matrices", "matrices"), ("fake_quant", "fake-quant passes"), ("host", "host (offload)"),
        ("communication", "communication"), ("overlapped", "max(computing, communicating)"), ("serial", "sum"),
    ):  # fmt: skip
        values = [getattr(plan.time[stage], key) for stage in STAGES]
        rows.append([name, *(f"{v:.3g}" for v in values)])
    rows.append(["GB in collectives", *(gigabytes(plan.time[s].bytes) for s in STAGES)])
    rows.append(["tokens/s, sum", *(f"{plan.time[s].tokens / plan.time[s].serial:,.0f}" for s in STAGES)])
    hardware = plan.hardware
    stated = (
        f"Assumed: {hardware.flops / 1e12:g} TFLOP/s in bf16 and {hardware.fp32_flops / 1e12:g} in fp32 at MFU "
        f"{hardware.mfu:g}, memory {hardware.bandwidth / 1e9:g} GB/s, "
        f"links {hardware.link / 1e9:g} GB/s in a node and {hardware.network / 1e9:g} between nodes, each × "
        f"{hardware.efficiency:g}. Not measured."
    )
    return f"{columns(rows)}\n{stated}"


def _export(plan: Plan) -> str:
    size = plan.size
    copied = f", and {plan.extra_bytes:,} copied from the checkpoint" if plan.extra_bytes else ""
    return (
        f"export: {size.total:,} bytes in {size.tensors:,} tensors ({size.codes:,} codes, {size.scales:,} scales, "
        f"{size.zero_points:,} zero points, {size.shapes:,} shapes, {size.kept:,} kept in {plan.dtype}){copied}"
    )


def _serving(plan: Plan) -> str:
    if not plan.layers:
        return ""
    lines = [
        f"kernels at tensor parallelism {plan.tp}, {len(plan.layers)} different quantised matrices (the export is "
        "compressed-tensors; AWQ, GPTQ, GGUF and OpenVINO files would be made from it):"
    ]
    for kernel in KERNELS:
        layers = [x for x in plan.layers if (kernel.experts if x.experts else kernel.dense) is not None]
        names = {layer.name for layer in layers}
        refused = [r for r in plan.refusals[f"{kernel.runtime} {kernel.name}"] if r.layer in names]
        what = "" if len(layers) == len(plan.layers) else " dense" if kernel.experts is None else " routed experts"
        count = f"all{what}" if not refused else f"{len(layers) - len(refused)} of {len(layers)}{what}"
        lines.append(f"  {kernel.runtime} {kernel.name}: {count if layers else 'nothing here'}")
        lines += [f"      {names}: {reason} → {remedy}" for (reason, remedy), names in _grouped(refused).items()]
    return "\n".join(lines)


def _grouped(refused: Sequence[Refusal]) -> dict[tuple[str, str], str]:
    """(reason, remedy) -> names of the layers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for refusal in refused:
        groups.setdefault((refusal.reason, refusal.remedy), []).append(refusal.layer)
    return {key: ", ".join(names) for key, names in groups.items()}


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    )
