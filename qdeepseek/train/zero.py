"""DeepSpeed's ZeRO through Lightning, on GPUs over NCCL and, for tests, on CPUs over gloo: the same code.

    stage 1   every rank holds all weights; the optimizer's moments and fp32 copies are in parts
    stage 2   gradients too                          stage 3   weights too, gathered module by module

Precision. Weights stay in fp32, which fake-quant, learned scales, routers and their biases need, and `bf16-mixed` is
DeepSpeed's torch_autocast: matrix products in bf16. The master copy, 4 bytes a parameter in DeepSpeed's bf16 engine
beside 2 of the weight itself, is then the weight (`share_masters`): 12 bytes a parameter with Adam instead of 14 (stage
3; under stages 1 and 2 a replica costs 4 bytes instead of 2). Its bf16 engine casts every parameter to bf16, scales and
routers included, and flattens groups in one dtype, so that `bf16-true` and fp16 are refused. Gathers are in fp32
(`lower_precision_safe_modules` is empty): codes of a weight that was rounded to bf16 first are not those of the weight.

Lightning 2.6 refuses CPUs in three places and divides the loss of a micro-batch by the accumulation, which DeepSpeed
does again: overridden here. An MoE block, or each chunk of its experts, is a z3 leaf: its parameters are gathered when
it is entered, whatever tokens a rank has for them, so that ranks never wait for one another. A leaf's gradients are
taken when that of its input is there, at once where the input needs none: behind frozen embeddings (LoRA) the input is
made to need one. The teacher is a submodule while the engine is built, so that stage 3 splits and gathers it like the
student, and none after, so that no checkpoint has it.

A checkpoint is a folder to which every rank writes. It is complete when it holds COMPLETE, written by rank 0 after all.
Read by another number of ranks it is first turned into DeepSpeed's universal format, a file a parameter (universal.py).
"""

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from qdeepseek.layers import ExpertChunks
from qdeepseek.surgery.families import is_fused_experts
from qdeepseek.train.checkpoints import COMPLETE
from qdeepseek.train.config import ConfigError
from qdeepseek.train.universal import UNIVERSAL, restore_groups, saved_ranks

if TYPE_CHECKING:
    import deepspeed

PRECISIONS = ("32-true", "bf16-mixed")
FILE = "deepspeed.json"
TEACHER = "teacher_of_zero"


@dataclass(frozen=True)
class ZeroConfig:
    """conf/strategy/zero*.yaml.

    stage: 1, 2 or 3.
    offload: moments and fp32 weights (stage 3: all weights) live in host memory.
    zero_optimization: further keys of DeepSpeed's section of that name, as they are in its JSON.
    """

    name: str
    stage: int
    offload: bool = False
    zero_optimization: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage {self.stage} is none of 1, 2, 3; without ZeRO use strategy=ddp")
        fixed = sorted({"stage", "offload_optimizer", "offload_param"} & set(self.zero_optimization))
        if fixed:
            raise ValueError(f"zero_optimization.{fixed[0]} follows from stage and offload; set those instead")


def deepspeed_config(config: ZeroConfig, precision: str) -> dict[str, Any]:
    """DeepSpeed's JSON; accumulation, micro-batch and clipping are added by Lightning from the trainer's values.

    Raises ConfigError for a precision that this file refuses.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"trainer.precision {precision} with strategy {config.name}: DeepSpeed would cast learned scales and "
            f"routers to it; use one of {', '.join(PRECISIONS)} (weights in fp32, products in bf16)"
        )
    zero = {"stage": config.stage, **config.zero_optimization}
    if config.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if config.stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's AdamW
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "torch_autocast": {
            "enabled": precision == "bf16-mixed", "dtype": "bfloat16", "lower_precision_safe_modules": [],
        },
    }  # fmt: skip


def import_deepspeed() -> Any:
    """The module, told of the machine it runs on. Raises ConfigError where it is not installed."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # before the import, or DeepSpeed looks for compilers
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"strategy zero*: DeepSpeed cannot be imported ({error}); pip install 'qdeepseek[deepspeed]'"
        ) from error
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of g++ for inference only
    return deepspeed


class Zero(DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy on any device, with the JSON it runs by in the run's folder."""

    strategy_name = "qdeepseek_zero"

    def __init__(self, config: ZeroConfig, precision: str):
        import_deepspeed()
        super().__init__(config=deepspeed_config(config, precision))
        self.stage = config.stage

    @property
    def root_device(self) -> torch.device:
        device = super().root_device  # DeepSpeed wants an index, which CPUs have none of
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        if isinstance(self.accelerator, CPUAccelerator):
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def setup(self, trainer: L.Trainer) -> None:
        module: Any = self.lightning_module
        mark_leaves(module.model)
        if self.stage == 3 and not module.model.get_input_embeddings().weight.requires_grad:
            module.model.enable_input_require_grads()
        teacher = getattr(module, "teacher", None)
        if teacher is not None and self.stage == 3:
            mark_leaves(teacher)
            module.add_module(TEACHER, teacher.eval().requires_grad_(False))
        super().setup(trainer)
        engine: Any = self.model  # moves no module that came in parts, and Lightning would think it on the CPU
        _update_properties(module, device=engine.device)
        module._modules.pop(TEACHER, None)
        share_masters(getattr(engine, "optimizer", None))
        write_json(Path(trainer.default_root_dir) / FILE, self.config)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        folder = Path(self.broadcast(filepath))
        if self.is_global_zero and folder.exists():
            shutil.rmtree(folder)
        self.barrier()
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.barrier()
        if self.is_global_zero:
            (folder / COMPLETE).touch()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        folder = Path(checkpoint_path)
        if saved_ranks(folder) == self.world_size:
            return super().load_checkpoint(checkpoint_path, weights_only)
        engine: Any = self.deepspeed_engine  # the fit's trainer has converted it (run.py)
        engine._config.load_universal_checkpoint = True
        _, state = engine.load_checkpoint(str(folder), tag=UNIVERSAL, load_lr_scheduler_states=False)
        engine._config.load_universal_checkpoint = False  # what this run saves is read as it is (guard)
        restore_groups(folder, engine.basic_optimizer)
        return state

    def teardown(self) -> None:
        engine: Any = self.model
        super().teardown()
        if hasattr(engine, "destroy"):
            engine.destroy()


def share_masters(optimizer: Any) -> None:
    """Let a part of fp32 weights at stage 3 be its own master copy, 4 bytes a parameter less.

    DeepSpeed 0.19 means to (stage3.py, _create_fp32_partitions) but compares a torch.device with its name, which is
    never equal, and clones. The step's copy from master to weight is then one of a tensor to itself.
    """
    weights, masters = (getattr(optimizer, f"{kind}_partitioned_groups_flat", ()) for kind in ("fp16", "fp32"))
    for weight, master in zip(weights, masters, strict=True):
        if weight is not None and (weight.dtype, weight.device) == (master.dtype, master.device):
            master.data = weight.data


def mark_leaves(model: nn.Module) -> None:
    """Make every module that holds fused experts a leaf of ZeRO-3, and every chunk of experts one of its own."""
    from deepspeed.utils import set_z3_leaf_module

    for module in list(model.modules()):
        experts = [child for child in module.children() if is_fused_experts(child)]
        for leaf in experts if isinstance(module, ExpertChunks) else [module] if experts else []:
            set_z3_leaf_module(leaf, True)


@rank_zero_only
def write_json(file: Path, config: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config, indent=1, default=str) + "\n", encoding="utf-8")


def engine_of(trainer: L.Trainer) -> "deepspeed.DeepSpeedEngine | None":
    """The engine of a fit under ZeRO, else None."""
    return trainer.model if isinstance(trainer.strategy, DeepSpeedStrategy) else None


def steps_now(trainer: L.Trainer) -> bool:
    """Whether the step that Lightning announces is one: with DeepSpeed it announces every micro-batch."""
    engine = engine_of(trainer)
    return engine is None or bool(engine.is_gradient_accumulation_boundary())


def steps_on_host(trainer: L.Trainer) -> bool:
    """Whether the optimizer works in host memory, whatever the device of the model."""
    engine = engine_of(trainer)
    return engine is not None and bool(engine.zero_use_cpu_optimizer())


def torch_optimizer(trainer: L.Trainer) -> torch.optim.Optimizer:
    """torch's own optimizer, which DeepSpeed wraps."""
    engine = engine_of(trainer)
    return trainer.optimizers[0] if engine is None else engine.basic_optimizer


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """For a backward that leaves `.grad` alone: a leaf of ZeRO-3 reduces gradients in a hook of the module, of whatever
    kind the backward is, and DeepSpeed's would add zeros to those of the step. Forward and backward both inside."""
    leaves = [module for module in model.modules() if getattr(module, "_z3_leaf", False)]
    hooks = [module._backward_hooks for module in leaves]
    for module in leaves:
        module._backward_hooks = OrderedDict()
    try:
        yield
    finally:
        for module, own in zip(leaves, hooks, strict=True):
            module._backward_hooks = own


def is_partitioned(parameters: Iterable[Tensor]) -> bool:
    """Whether ZeRO-3 holds these in parts."""
    return any(hasattr(p, "ds_id") for p in parameters)


def elements(parameter: Tensor) -> int:
    """Number of elements of the whole parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@contextmanager
def gathered(parameters: Iterable[Tensor], *, write: bool = False) -> Iterator[None]:
    """Parameters of ZeRO-3 whole inside, a collective of all ranks; nothing to do without ZeRO-3.

    write: what rank 0 wrote into them stays (DeepSpeed's fp32 copies do not follow, see `refresh`).
    """
    parts = [p for p in parameters if hasattr(p, "ds_id")]
    if not parts:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parts, modifier_rank=0 if write else None):
        yield


def refresh(trainer: L.Trainer) -> None:
    """Take over into ZeRO's own fp32 copies what was written into parameters outside of an optimizer step."""
    engine = engine_of(trainer)
    if engine is not None:
        engine.optimizer.refresh_fp32_params()
