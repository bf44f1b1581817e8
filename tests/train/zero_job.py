"""Run by test_zero.py, two processes over gloo: the same fits under DDP and ZeRO-1/2/3, one process group for all."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from transformers import DeepseekV3ForCausalLM

from qdeepseek.surgery import Recipe, chunk_experts, prepare
from qdeepseek.train.callbacks.compensation_cage import Cage
from qdeepseek.train.callbacks.compensation_seed import SeedCompensation
from qdeepseek.train.callbacks.fake_quant import FakeQuant
from qdeepseek.train.callbacks.guard import Guard, NonFiniteError
from qdeepseek.train.callbacks.kv_cache import KVCacheQuant
from qdeepseek.train.callbacks.lora import LoRA
from qdeepseek.train.callbacks.precision import on_spikes, progressive
from qdeepseek.train.callbacks.routing import Routing
from qdeepseek.train.config import OptimConfig
from qdeepseek.train.events import read_events
from qdeepseek.train.module import FineTune
from qdeepseek.train.run import precision_plugins
from qdeepseek.train.strategy import make
from qdeepseek.train.zero import ZeroConfig, gathered
from tests.surgery.test_chunks import by_whole_name
from tests.train.test_config import composed
from tests.train.test_guard import EXPERTS, NORM, data_module, poison

# as in a model too large to stay whole between its forward and its backward
PARTS = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
ZERO = {f"zero{stage}": ZeroConfig(f"zero{stage}", stage, zero_optimization=PARTS) for stage in (1, 2, 3)}
ZERO["zero3_offload"] = ZeroConfig("zero3_offload", 3, offload=True, zero_optimization=PARTS)
SPIKES: dict[str, Any] = {
    "raise_at": 1.05, "lower_at": 1.01, "history": 0.5, "warmup": 2, "lock": 2, "calm": 1, "settle": 1, "budget": 0.5,
}  # fmt: skip


class Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


class OwnExperts(L.Callback):
    """Each rank sends its tokens to experts that the other rank does not use."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for module in pl_module.model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.zero_()[4 * trainer.global_rank : 4 * trainer.global_rank + 4] = (
                    2.0  # scores are below 1
                )


def student_of(folder: str, chunks: int = 1) -> Any:
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chunk_experts(model, chunks)
    prepare(model, Recipe.from_config(composed("run_dir=x")["quant"]))
    return model


def attached(callback: Any, student: Any, folder: Path, steps: int) -> Any:
    """A method that wants to see the prepared student, as qat.quantise_aware shows it."""
    method = SimpleNamespace(delay_steps=0)
    callback.attach(SimpleNamespace(folder=folder, wandb=None, qat_steps=steps, method=method), student)
    return callback


def fit(
    where: str, student: Any, callbacks: list[Any], folder: Path, *, steps: int = 4, accumulate: int = 1,
    teacher: Any = None, precision: Any = "32-true",
) -> dict[str, Any]:  # fmt: skip
    losses, strategy = Losses(), "ddp" if where == "ddp" else make(ZERO[where], precision)
    plugins: Any = precision_plugins(precision, "cpu", strategy)
    trainer = L.Trainer(
        max_steps=steps, max_epochs=-1, accumulate_grad_batches=accumulate, gradient_clip_val=0.1, accelerator="cpu",
        devices=2, strategy=strategy, logger=False, precision=None if plugins else precision, plugins=plugins,
        callbacks=[*callbacks, losses], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False, default_root_dir=folder,
    )  # fmt: skip
    module = FineTune(
        student, OptimConfig(lr=1e-3, scale_lr=1e-4, warmup_steps=1), steps, teacher, 0.5 if teacher else 0
    )
    trainer.fit(module, data_module())
    found: dict[str, Any] = {"losses": losses.losses, "names": sorted(module.state_dict())}
    with gathered(student.parameters()):
        found["weights"] = {n: p.detach().clone() for n, p in student.named_parameters()}
    found["buffers"] = {n: b.detach().clone() for n, b in student.named_buffers()}
    found["dtypes"] = {n: str(t.dtype) for n, t in [*found["weights"].items(), *found["buffers"].items()]}
    return found


def everything(where: str, model: str, folder: Path) -> dict[str, Any]:
    """Accumulation, clipping, distillation, compensation, routing loss with limits, bias update, temperature, a cached
    weight, a quantised KV cache."""
    student, kv_cache = student_of(model), KVCacheQuant({"dtype": "int8"})
    kv_cache.attach(None, student)
    teacher = DeepseekV3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    routing = Routing(entropy={"weight": 0.5}, bias_speed=0.01, entropy_and_bias=True, gradient={"max_norm": 0.1},
                      temperature={"target": 0.5, "speed": 0.01})  # fmt: skip
    callbacks = [FakeQuant(cache=True, recompute=where == "zero2"), SeedCompensation(), routing, kv_cache]
    found = fit(where, student, callbacks, folder, accumulate=2, teacher=teacher)
    return {**found, "load": routing.facts()["load"]}


def decisions(where: str, model: str, folder: Path) -> dict[str, Any]:
    """Scheduler and guard on ranks with different data: a NaN on rank 1 alone."""
    student, guard, own = student_of(model), Guard(patience=3), folder / f"rank{torch.distributed.get_rank()}"
    precision = attached(on_spikes(**SPIKES), student, own, 9)
    rank, data = torch.distributed.get_rank(), data_module()
    data.trainer = SimpleNamespace(global_rank=rank, world_size=2)  # type: ignore[assignment]
    if rank == 1:
        poison(student, EXPERTS, [2], data)
    found = fit(where, student, [FakeQuant(), guard, precision], folder, steps=9)
    events = (own / "events.jsonl").read_text().splitlines() if (own / "events.jsonl").exists() else []
    return {**found, "guard": guard.events, "events": events, "rungs": precision.scheduler.rungs}


class InfinitePart(L.Callback):
    """From step 2 on, rank 1's part of one weight holds an inf, which no other rank can see in its own part."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step >= 1 and trainer.global_rank == 1:
            weight = pl_module.model.get_submodule(NORM).weight
            getattr(weight, "ds_tensor", weight).data[0] = torch.inf


def broken(where: str, model: str, folder: Path) -> dict[str, Any]:
    """An infinite weight that does not go away stops the run, on both ranks."""
    guard = Guard(patience=2)
    try:
        fit(where, student_of(model), [InfinitePart(), FakeQuant(), guard], folder, accumulate=2)
    except NonFiniteError as error:
        return {"losses": [], "guard": guard.events, "stopped": str(error)}
    return {"losses": [], "guard": guard.events, "stopped": None}


CASES = {"everything": everything, "decisions": decisions, "broken": broken}


def cage(where: str, model: str, folder: Path) -> dict[str, Any]:
    return fit(where, student_of(model), [FakeQuant(), Cage(strength=300.0, silence=0.25, log_every=1)], folder)


def lowering(where: str, model: str, folder: Path) -> dict[str, Any]:
    student, own = student_of(model), folder / f"rank{torch.distributed.get_rank()}"
    precision = attached(progressive(warmup=1), student, own, 8)
    found = fit(where, student, [FakeQuant(), precision], folder, steps=8)
    groups = [(event["step"], event["group"]) for event in read_events(own, "precision")]
    return {**found, "rungs": precision.scheduler.rungs, "groups": groups}


def disjoint(where: str, model: str, folder: Path) -> dict[str, Any]:
    return fit(where, student_of(model), [FakeQuant(), OwnExperts()], folder, steps=2)


def chunks(where: str, model: str, folder: Path) -> dict[str, Any]:
    """Experts whole at stage 2, in four chunks at stage 3, two of which no token of this rank chooses; the methods that
    reach into experts, a teacher in chunks too, gradient checkpointing, accumulation."""
    number = 1 if where == "zero2" else 4
    student, teacher = student_of(model, number), DeepseekV3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    student.gradient_checkpointing_enable({"use_reentrant": False})
    chunk_experts(teacher, number)
    guard = Guard(patience=2)
    callbacks = [FakeQuant(), OwnExperts(), SeedCompensation(), Routing(entropy={"weight": 0.5}), guard]
    found = fit(where, student, callbacks, folder, steps=3, accumulate=2, teacher=teacher)
    return {**found, "weights": by_whole_name(found["weights"]), "guard": guard.events}


def mixed(where: str, model: str, folder: Path) -> dict[str, Any]:
    return fit(where, student_of(model), [FakeQuant()], folder, steps=2, precision="bf16-mixed")


def lora(where: str, model: str, folder: Path) -> dict[str, Any]:
    """Adapters on a frozen quantised model, which stage 3 splits too; saved, and merged where nothing is split."""
    student, adapters = student_of(model), LoRA(rank=4, log_every=1)
    run = SimpleNamespace(method=SimpleNamespace(recompute=False, start="base"), model=SimpleNamespace(path=model),
                          folder=folder, device="cpu")  # fmt: skip
    adapters.attach(run, student)
    found = fit(where, student, [FakeQuant(), adapters], folder, steps=3)
    adapters.finish(run, student)
    return found


CASES |= {"lora": lora, "cage": cage, "lowering": lowering, "disjoint": disjoint, "mixed": mixed, "chunks": chunks}


def main(model: str, folder: Path, plan: dict[str, list[str]]) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    fit("ddp", student_of(model), [], folder, steps=1)  # the process group
    for case, places in plan.items():
        found[case] = {where: CASES[case](where, model, folder / case / where) for where in places}
        if torch.distributed.get_rank() == 0:
            print(case, {w: [round(x, 5) for x in f["losses"]] for w, f in found[case].items()}, flush=True)
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
