"""Everything about a run that is known before it: coverage, memory, time, the size of the export, who can serve it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from qdeepseek.export.checkpoint import Checkpoint
from qdeepseek.export.entries import entries_of
from qdeepseek.export.size import ExportSize, export_size
from qdeepseek.plan.architecture import Architecture, architecture_of, meta_model
from qdeepseek.plan.blocks import Block, blocks_of
from qdeepseek.plan.hardware import Hardware
from qdeepseek.plan.memory import FUSED_LAYER, STAGES, Job, Memory, Stage, memory
from qdeepseek.plan.serving import serving_layers
from qdeepseek.plan.time import StepTime, active_parameters, step_time
from qdeepseek.surgery import Coverage, Recipe, prepare
from qdeepseek.surgery import plan as cover
from qdeepseek.surgery.families import is_mtp_parameter
from qdeepseek.surgery.runtimes import KERNELS, Layer, Refusal, refusals
from qdeepseek.train.config import ConfigError, ExportConfig, MethodConfig, build
from qdeepseek.train.methods import split
from qdeepseek.train.models import DTYPES, ModelConfig
from qdeepseek.train.partitioned import check_chunks
from qdeepseek.train.run import TrainerConfig
from qdeepseek.train.strategy import zero_config
from qdeepseek.train.streaming import check_streams, whole_because

LENGTH = 4096


@dataclass(frozen=True)
class Plan:
    """The plan of one job on one kind of machine."""

    model: str
    source: str
    coverage: Coverage
    blocks: tuple[Block, ...]
    chunked: tuple[Block, ...]
    architecture: Architecture
    job: Job
    hardware: Hardware
    size: ExportSize
    extra_bytes: int
    tp: int
    dtype: str
    chosen: str
    whole: str | None = None  # why no stage streams the model (train/streaming.py)
    notes: tuple[str, ...] = ()

    @cached_property
    def memory(self) -> dict[Stage, Memory]:
        return {stage: memory(self.blocks_at(stage), self.architecture, self.job, stage) for stage in STAGES}

    @cached_property
    def time(self) -> dict[Stage, StepTime]:
        return {s: step_time(self.blocks_at(s), self.architecture, self.job, self.hardware, s) for s in STAGES}

    def blocks_at(self, stage: Stage) -> tuple[Block, ...]:
        """The blocks, their experts in chunks where weights are in parts."""
        return self.chunked if stage in FUSED_LAYER else self.blocks

    @cached_property
    def active(self) -> float:
        return active_parameters(self.blocks, self.architecture)

    def other_checkpointing(self, stage: Stage) -> Memory:
        """Memory with gradient checkpointing the other way round."""
        job = replace(self.job, checkpointing=not self.job.checkpointing)
        return memory(self.blocks_at(stage), self.architecture, job, stage)

    def fits(self, memory: Memory) -> bool:
        """In a GPU less its reserve, and in the host."""
        hardware = self.hardware
        return memory.total <= hardware.memory - hardware.reserve and memory.host <= hardware.host_memory

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return serving_layers(self.coverage, self.architecture, self.tp, self.dtype)

    @cached_property
    def refusals(self) -> dict[str, tuple[Refusal, ...]]:
        """By `runtime kernel`."""
        return {f"{k.runtime} {k.name}": refusals(k, self.layers, self.tp) for k in KERNELS}

    def to_dict(self) -> dict[str, Any]:
        coverage = self.coverage.to_dict()
        coverage.pop("tensors")
        stages = {}
        for stage in STAGES:
            other = self.other_checkpointing(stage)
            stages[stage] = {
                "memory": self.memory[stage].to_dict(), "fits": self.fits(self.memory[stage]),
                "other_checkpointing": {"total": other.total, "fits": self.fits(other)},
                "time": self.time[stage].to_dict(),
            }  # fmt: skip
        return {
            "model": self.model, "configuration": self.source, "coverage": coverage,
            "active_parameters": self.active, "expert_chunks": self.chunked[0].chunks,
            "job": asdict(self.job), "hardware": asdict(self.hardware),
            "chosen": self.chosen, "stages": stages,
            "export": {**self.size.to_dict(), "copied": self.extra_bytes, "dtype": self.dtype},
            "tp": self.tp, "layers": [asdict(layer) for layer in self.layers],
            "refusals": {name: [asdict(r) for r in found] for name, found in self.refusals.items()},
            "notes": list(self.notes),
        }  # fmt: skip


def make_plan(config: Mapping[str, Any], chosen: str) -> Plan:
    """The plan of a composed configuration (conf/plan.yaml); `chosen` is the name of its strategy.

    Raises ConfigError or CoverageError for a value that could not be trained either.
    """
    model_config = build(ModelConfig, config["model"], "model")
    own, groups = split(config["method"])
    method = build(MethodConfig, own, "method")
    trainer = build(TrainerConfig, config["trainer"], "trainer")
    export = build(ExportConfig, config["export"], "export")
    _check_machines(trainer)
    if "stage" in config["strategy"]:
        zero_config(config)
    try:
        recipe = Recipe.from_config(config["quant"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    model, source = meta_model(model_config)
    check_chunks(model, model_config.expert_chunks)
    whole = whole_because(model_config, method, recipe, bool(groups.get("lora")))
    if chosen in FUSED_LAYER:
        check_streams(model_config.expert_chunks, whole)
    coverage = cover(model, recipe)
    architecture = architecture_of(model)
    prepare(model, recipe, initialize=False)
    dtype = export.dtype or _served(recipe, model_config.dtype)
    extra, note = _extra(model_config, architecture)
    job = _job(config, model_config, method, trainer)
    tp = config["tp"]
    if not isinstance(tp, int) or tp < 1:
        raise ConfigError(f"tp {tp} must be a whole number, at least 1")
    return Plan(
        model=str(model_config.path or "scratch"), source=source, coverage=coverage, blocks=blocks_of(coverage),
        chunked=blocks_of(coverage, 1 if whole else model_config.expert_chunks), architecture=architecture, job=job,
        hardware=build(Hardware, config["hardware"], "hardware"),
        size=export_size(entries_of(model), DTYPES[dtype]), extra_bytes=extra, tp=tp, dtype=dtype, chosen=chosen,
        whole=whole, notes=tuple(n for n in (note, *_notes(model_config, chosen, groups)) if n),
    )  # fmt: skip


def _check_machines(trainer: TrainerConfig) -> None:
    """Refuses the trainer's words for machines, which the plan has its own for."""
    if trainer.devices != "auto" or trainer.nodes != 1:
        raise ConfigError(
            f"trainer.devices {trainer.devices} and trainer.nodes {trainer.nodes} say nothing to a plan; give gpus= "
            f"(of one node) and nodes="
        )


def _job(config: Mapping[str, Any], model: ModelConfig, method: MethodConfig, trainer: TrainerConfig) -> Job:
    data = config["data"]
    values = {
        "nodes": config["nodes"], "gpus": config["gpus"], "batch": data["batch_size"],
        "length": data.get("length") or data.get("max_length") or LENGTH if config["length"] is None
        else config["length"],
        "accumulate": trainer.accumulate, "precision": trainer.precision,
        "weight_bytes": torch.finfo(DTYPES[model.dtype]).bits // 8, "checkpointing": model.gradient_checkpointing,
        "cached": method.cache, "recompute": method.recompute, "teacher": method.distill_weight > 0,
    }  # fmt: skip
    zero = config["strategy"].get("zero_optimization") or {}
    keys = {"bucket": "reduce_bucket_size", "live": "stage3_max_live_parameters", "sub_group": "sub_group_size"}
    values |= {name: int(zero[key]) for name, key in keys.items() if key in zero}
    return build(Job, values, "plan")


def _served(recipe: Recipe, trained: str) -> str:
    """The dtype that weights were trained to be served in; without a recipe that of training."""
    dtypes = {rule.scheme.weight.serve_dtype for rule in recipe.rules if rule.scheme is not None} - {None}
    return str(dtypes.pop()) if len(dtypes) == 1 else trained


def _extra(model: ModelConfig, a: Architecture) -> tuple[int, str | None]:
    """Bytes of multi-token prediction, which the export copies in bf16: from the checkpoint, or from its shapes."""
    folder = Path(model.folder)
    layers = len(a.kinds)
    if model.path and any(folder.glob("*.safetensors")):
        checkpoint = Checkpoint(folder)
        found = [checkpoint.info(name) for name in checkpoint if is_mtp_parameter(name, layers)]
        return sum(torch.Size(i.shape).numel() * 2 for i in found), None
    if not a.extra_layers or model.scratch is not None or folder.is_dir():
        return 0, None
    attention = a.hidden * (a.q_rank + a.kv_rank + a.rope) + a.q_rank * (a.heads * a.query + 1)
    attention += a.kv_rank * (a.heads * (a.query - a.rope + a.value) + 1) + a.heads * a.value * a.hidden
    experts = 3 * a.hidden * (a.experts * a.expert + a.shared) + a.experts * (a.hidden + 1)
    own = 2 * a.hidden * a.hidden + 2 * a.vocab * a.hidden + 5 * a.hidden
    note = f"{a.extra_layers} multi-token-prediction layer is copied from the checkpoint in bf16, not trained"
    return 2 * a.extra_layers * (attention + experts + own), note


def _notes(model: ModelConfig, chosen: str, groups: Mapping[str, Any]) -> list[str]:
    notes = []
    if groups.get("lora"):
        notes.append("method.lora is on, which the plan does not model: memory is that of full QAT, an upper bound")
    if model.expert_chunks > 1 and chosen not in FUSED_LAYER:
        notes.append(
            f"model.expert_chunks {model.expert_chunks} is for strategy=zero3 and zero3_offload; to train with "
            f"strategy {chosen} set model.expert_chunks=1"
        )
    return notes
