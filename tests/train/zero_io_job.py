"""Run by test_zero_io.py in two processes: models in and out of ZeRO, and real QAT stages under its three stages.

Every check that needs both ranks is made here; rank 0 writes what it found to FOLDER/found.json. The state of each
trained student is also written as a plain Lightning checkpoint, which the test exports beside the ZeRO one.
"""

import json
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from qdeepseek.export.sources import FolderSource
from qdeepseek.surgery import Recipe, chunk_experts, plan, prepare
from qdeepseek.train import qat
from qdeepseek.train import strategy as strategies
from qdeepseek.train.artifacts import open_folder
from qdeepseek.train.config import ConfigError
from qdeepseek.train.gathered import save_gathered, whole_tensors
from qdeepseek.train.models import ModelConfig, load_model
from qdeepseek.train.module import FineTune
from qdeepseek.train.partitioned import load_partitioned
from qdeepseek.train.run import build_trainer, fit
from qdeepseek.train.save import save_model
from qdeepseek.train.saved import open_checkpoint
from qdeepseek.train.zero import ZeroConfig, deepspeed_config, import_deepspeed
from tests.surgery.test_chunks import by_whole_name

CONF = Path(__file__).parents[2] / "conf"


def recipe(method: dict[str, Any]) -> Recipe:
    config: Any = OmegaConf.to_container(OmegaConf.load(CONF / "quant" / "w4a16_g32.yaml"))
    config["schemes"]["main"]["method"] = method
    return Recipe.from_config(config)


def run_config(folder: Path, overrides: list[str]) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("train", [*overrides, f"run_dir={folder}"]), resolve=True)
    return config


def different(model: PreTrainedModel, reference: PreTrainedModel) -> list[str]:
    """Names of tensors, non-persistent buffers included, in which the gathered model is not the reference."""
    expected = reference.state_dict() | dict(reference.named_buffers())
    found, state = [], model.state_dict()
    kept = [pair for pair in model.named_buffers() if pair[0] not in state]
    for name, tensor in chain(whole_tensors(model), kept):
        other = expected.pop(name)
        if tensor.dtype != other.dtype or not torch.equal(tensor, other):
            found.append(name)
    tied = {n for n, p in reference.named_parameters(remove_duplicate=False)} - dict(
        reference.named_parameters()
    ).keys()
    return found + [f"{name} missing" for name in expected if name not in tied]


def check_load(
    path: Path, dtype: str, method: dict[str, Any] | None, zero: dict[str, Any], chunks: int = 1
) -> list[str]:
    config = ModelConfig(path=str(path), dtype=dtype, expert_chunks=chunks)
    chosen = None if method is None else recipe(method)
    model, reference = load_partitioned(config, chosen, zero), load_model(config)
    chunk_experts(reference, chunks)
    if chosen is not None:
        prepare(reference, chosen)
    wrong = different(model, reference)
    if model.config.to_dict() != reference.config.to_dict():
        wrong.append("config")
    if model.generation_config.to_dict() != reference.generation_config.to_dict():
        wrong.append("generation_config")
    if any(p.numel() for p in model.parameters()):
        wrong.append("a parameter is whole")
    return wrong


def check_save(path: Path, dtype: str, folder: Path, zero: dict[str, Any], chunks: int = 1) -> list[str]:
    """`save_gathered` against `save_pretrained` of one process: the same tensors and the same files beside them."""
    config = ModelConfig(path=str(path), dtype=dtype, expert_chunks=chunks)
    tokenizer = AutoTokenizer.from_pretrained(path)
    gathered, alone = folder / "gathered", folder / "alone"
    model = load_partitioned(config, None, zero)
    save_gathered(model, tokenizer, gathered, max_shard_bytes=500_000)
    save_model(load_model(config), tokenizer, alone)
    dist.barrier()
    a, b = (
        {k: v for file in sorted(place.glob("*.safetensors")) for k, v in load_file(file).items()}
        for place in (gathered, alone)
    )
    wrong = [k for k in a.keys() | b.keys() if k not in a or k not in b or a[k].dtype != b[k].dtype]
    wrong += [k for k in a.keys() & b.keys() if not torch.equal(a[k], b[k])]
    texts = {f.name for f in alone.iterdir() if f.suffix != ".safetensors"}
    wrong += [name for name in texts if (gathered / name).read_bytes() != (alone / name).read_bytes()]
    full = folder / "full"
    full.write_text("a file where the folder's parent should be")
    try:
        save_gathered(model, tokenizer, full / "model")
    except OSError:
        return wrong
    return [*wrong, "no error from a disk that cannot be written"]


def check_unreadable(path: Path, zero: dict[str, Any]) -> list[str]:
    """What every rank says when rank 0's disk fails in the middle of a load."""
    stock = FolderSource.weight

    def fail(self: Any, parameter: str, expert: int | None = None) -> torch.Tensor:
        if parameter == "model.layers.1.mlp.experts.down_proj" and expert == 3:
            raise OSError("Input/output error")
        return stock(self, parameter, expert)

    FolderSource.weight = fail  # type: ignore[method-assign]
    said: list[Any] = [None, None]
    try:
        load_partitioned(ModelConfig(path=str(path)), None, zero)
    except (OSError, ConfigError) as error:
        dist.all_gather_object(said, str(error))
    finally:
        FolderSource.weight = stock  # type: ignore[method-assign]
    return said


def peak_of_load(path: Path, zero: dict[str, Any]) -> dict[str, float]:
    """Bytes by which this process grew at its highest while it loaded, and the sizes to compare with."""

    def status(key: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = status("VmRSS")
    model = load_partitioned(ModelConfig(path=str(path), dtype="bfloat16"), None, zero)
    peak = status("VmHWM") - before
    sizes = [p.ds_numel * p.element_size() for p in model.parameters()]
    return {"peak": peak, "partition": sum(p.ds_tensor.nbytes for p in model.parameters()), "largest": max(sizes),
            "whole": sum(sizes)}  # fmt: skip


def train(config: dict[str, Any], folder: Path) -> float:
    """The QAT stage of a run; leaves its checkpoint and the same state as a plain one. Returns the last loss."""
    run = qat.Run.from_config(config)
    open_folder(run.folder, run.config, plan(run.load("base"), run.recipe), ranks=2)
    losses: dict[str, Any] = {}
    stock = qat.fit

    def fit_and_keep(*arguments: Any) -> Any:
        losses.update(stock(*arguments))
        return losses

    qat.fit = fit_and_keep
    try:
        student = qat.quantise_aware(run)
    finally:
        qat.fit = stock
    state = {f"model.{name}": tensor.clone() for name, tensor in whole_tensors(student)}
    if dist.get_rank() == 0:
        torch.save({"state_dict": state, "global_step": run.qat_steps}, folder / "plain.ckpt")
    return losses["qat/loss"]


def train_partitioned(config: dict[str, Any], folder: Path) -> float:
    """The same stage, its student streamed into partitions instead of built whole, experts in four chunks; leaves its
    state under the names of whole experts."""
    config = {**config, "run_dir": str(folder), "model": {**config["model"], "expert_chunks": 4}}
    run = qat.Run.from_config(config)
    open_folder(run.folder, run.config, qat.check(run), ranks=2)
    torch.manual_seed(0)
    trainer = build_trainer(replace(run.trainer, steps=run.qat_steps), folder, "qat",
                            strategy=strategies.make(run.strategy, run.trainer.precision))  # fmt: skip
    trainer.strategy.setup_environment()
    student = load_partitioned(run.model, run.recipe, trainer.strategy.config)
    run.methods["kv_cache"].attach(run, student)
    module = FineTune(student, run.qat_optim, run.qat_steps, stage="qat")
    loss = fit(trainer, module, run.data.module(), folder, "qat")["qat/loss"]
    state = by_whole_name({f"model.{name}": tensor.clone() for name, tensor in whole_tensors(student)})
    if dist.get_rank() == 0:
        torch.save({"state_dict": state, "global_step": run.qat_steps}, folder / "plain.ckpt")
    return loss


class Wrapped(torch.nn.Module):
    """The model under the name that it has in FineTune."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, labels=ids, use_cache=False).loss


def check_bf16(path: Path, folder: Path) -> list[str]:
    """Names that `open_checkpoint` reads otherwise than a bf16 engine of stage 3 has them, one of them frozen."""
    import deepspeed

    model = load_model(ModelConfig(path=str(path), dtype="bfloat16")).train()
    model.model.embed_tokens.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=Wrapped(model), optimizer=torch.optim.AdamW(trained, lr=1e-2), dist_init_required=False,
        config={"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 3, "sub_group_size": 50_000}},
    )  # fmt: skip
    for _ in range(2):
        engine.backward(engine(torch.arange(40)[None]))
        engine.step()
    engine.save_checkpoint(str(folder), tag="checkpoint", client_state={"global_step": 2})
    dist.barrier()
    (folder / "complete").touch()
    saved = open_checkpoint(folder)
    wrong = [] if {t.dtype for t in saved.tensors.values()} >= {torch.bfloat16} else ["nothing is bf16"]
    for name, tensor in whole_tensors(model):
        read = saved.tensors[name].read()
        if read.dtype != tensor.dtype or not torch.equal(read, tensor.reshape(-1)):
            wrong.append(name)
    return wrong


def main(folder: Path, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo", verbose=False)
    zero = deepspeed_config(ZeroConfig("zero3", 3), "32-true")
    found: dict[str, Any] = {"load": {}, "loss": {}, "seconds": {}}
    start = time.perf_counter()
    learned, mse = {"kind": "mse", "learned": True, "mse_grid": 8}, {"kind": "mse", "mse_grid": 8}
    for name, dtype, method, chunks in (
        ("v3", "float32", learned, 1), ("v3", "bfloat16", mse, 1), ("v3", "float32", learned, 4),
        ("qwen2", "bfloat16", learned, 1), ("qwen2", "float32", None, 1),
        ("fp8", "float32", None, 1), ("fp8", "bfloat16", mse, 2),
    ):  # fmt: skip
        found["load"][f"{name} {dtype} {method} {chunks}"] = check_load(folder / name, dtype, method, zero, chunks)
    found["save"] = {f"{name} {chunks}": check_save(folder / name, "bfloat16", folder / f"saved_{name}", zero, chunks)
                     for name, chunks in (("v3", 4), ("qwen2", 1))}  # fmt: skip
    try:
        load_partitioned(ModelConfig(path=str(folder / "broken")), None, zero)
    except ConfigError as error:
        found["broken"] = str(error)
    found["unreadable"] = check_unreadable(folder / "v3", zero)
    found["seconds"]["io"] = time.perf_counter() - start
    peaks: list[Any] = [None, None]
    dist.all_gather_object(peaks, peak_of_load(folder / "big", zero))
    found["peaks"] = peaks
    found["seconds"]["peak"] = time.perf_counter() - start - found["seconds"]["io"]
    for strategy in ("zero1", "zero2", "zero3"):
        place = folder / strategy
        begun = time.perf_counter()
        found["loss"][strategy] = train(run_config(place, [*overrides, f"strategy={strategy}"]), place)
        found["seconds"][strategy] = time.perf_counter() - begun
    config = run_config(folder / "zero3", [*overrides, "strategy=zero3"])
    found["loss"]["streamed"] = train_partitioned(config, folder / "streamed")
    found["bf16"] = check_bf16(folder / "qwen2", folder / "bf16")
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found, indent=1))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
