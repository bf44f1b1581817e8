"""Loads a checkpoint straight into ZeRO-3 partitions: no rank ever holds the whole model.

A rank's memory is its share of the parameters plus one tensor:

    skeleton on meta, quantisers in place (surgery.prepare)
    for each parameter, in model order:
        rank 0 reads it from the shards, expert by expert, and finds its quantiser's scale, expert by expert
        DeepSpeed broadcasts it, every rank keeps ceil(n / ranks) elements of it

Rank 0 alone reads, since DeepSpeed's conversion broadcasts from rank 0 whatever the others hold; the headers of the
shards are read and compared with the skeleton on every rank first, so that a checkpoint that does not fit is the same
error everywhere and no rank waits for another. When rank 0 cannot read on (a lost disk) it goes on partitioning with
the others, and the error is raised on all of them at the end. Building under `deepspeed.zero.Init` and loading
afterwards (the way of the libraries) leaves fused experts and the router uninitialised, because their initialisation
sees empty parameters.

Persistent buffers and those of quantisers are whole on every rank. Buffers outside the checkpoint (rotary frequencies)
are what the constructor makes: only parameters are on the meta device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from qdeepseek.export import names
from qdeepseek.export.sources import STATE, FolderSource, slice_quantizer
from qdeepseek.layers import WeightQuantizer
from qdeepseek.surgery import (
    QuantizedTensor,
    Recipe,
    autocast_experts,
    check_expert_chunks,
    chunk_experts,
    is_fused_experts,
    prepare,
    quantized_tensors,
)
from qdeepseek.surgery.fp8 import check_trainable
from qdeepseek.train.config import ConfigError
from qdeepseek.train.everywhere import raise_everywhere
from qdeepseek.train.models import DTYPES, ModelConfig, checkpoint_folder, keeps_fp32, read_config
from qdeepseek.train.zero import import_deepspeed


def load_partitioned(config: ModelConfig, recipe: Recipe | None, zero_config: Mapping[str, Any]) -> PreTrainedModel:
    """The model of `config`, prepared by `recipe` (None: unquantised), every parameter partitioned over the ranks.

    zero_config: the DeepSpeed configuration of the run (zero.deepspeed_config, stage 3), which says where partitions
    live. All ranks call it together, after the process group exists (`trainer.strategy.setup_environment()`).

    Raises ConfigError, on all ranks alike, for a model without checkpoint and for a checkpoint that does not fit,
    CoverageError for a recipe that does not.
    """
    model = skeleton(config)
    if recipe is not None:
        prepare(model, recipe)
    folder = checkpoint_folder(config)
    fused = any(is_fused_experts(module) for module in model.modules())
    layout = names.layout_of(str(model.config.model_type), fused=fused)
    try:
        source = FolderSource(model, layout, folder, dequantized=DTYPES[config.dtype])
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {config.folder}: {error}") from error
    _check_complete(model, source, config.folder)
    _Loader(model, source, zero_config).fill()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.eval()


def skeleton(config: ModelConfig) -> PreTrainedModel:
    """The model as `load_model` builds it, its experts in chunks, parameters on the meta device and buffers real."""
    if config.scratch is not None:
        raise ConfigError("model.scratch has no checkpoint to stream; pretrain it first, or load it whole (load_model)")
    folder, settings = checkpoint_folder(config), read_config(config)
    check_trainable(folder, settings)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    model = empty_model(settings, DTYPES[config.dtype], config.attention)
    autocast_experts(model)
    check_chunks(model, config.expert_chunks)
    chunk_experts(model, config.expert_chunks)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def check_chunks(model: nn.Module, chunks: int) -> None:
    """Raises ConfigError unless the routed experts of every layer split into `chunks`."""
    try:
        check_expert_chunks(model, chunks)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from error


def empty_model(settings: PretrainedConfig, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    """A model without weights: parameters on the meta device, buffers as constructed, dtypes as when loaded."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention)
    model.tie_weights()  # every registration above made a meta parameter of its own
    for name, parameter in model.named_parameters():
        if keeps_fp32(model, name) and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return model


def _check_complete(model: nn.Module, source: FolderSource, where: str) -> None:
    """Raises ConfigError unless the folder has every tensor of the model in its shape."""
    hidden = {name for name, module in model.named_modules() if isinstance(module, WeightQuantizer)}
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if n.rpartition(".")[0] not in hidden}
    wrong = [problem for name, tensor in state.items() for problem in _problems(name, tensor, source)]
    if wrong:
        raise ConfigError(
            f"model.path {where}: {len(wrong)} of the model's tensors are missing or misshapen, first {wrong[0]}; the "
            f"checkpoint is incomplete or belongs to another configuration"
        )


def _problems(name: str, tensor: Tensor, source: FolderSource) -> Iterator[str]:
    for expert in range(tensor.shape[0]) if names.is_fused(name) else [None]:
        shape = tuple(tensor.shape if expert is None else tensor.shape[1:])
        stored = source.stored_names(name, expert)
        missing = [key for key in stored if key not in source.checkpoint]
        if missing:
            yield f"{missing[0]} (missing)"
            continue
        found = [source.checkpoint.info(key).shape for key in stored]
        rows = (sum(s[0] for s in found), *found[0][1:]) if all(found) else ()
        if rows != shape:
            yield f"{stored[0]} ({rows}, the model has {shape})"


class _Loader:
    """Fills and partitions a skeleton, parameter by parameter."""

    def __init__(self, model: PreTrainedModel, source: FolderSource, zero_config: Mapping[str, Any]):
        if not dist.is_initialized():
            raise RuntimeError("load_partitioned needs a process group; set up the strategy's environment first")
        self.model, self.source = model, source
        self.reads = dist.get_rank() == 0
        self.error: Exception | None = None
        self.partition = Partitioner(zero_config)
        self.device = self.partition.device
        self.quantized = {tensor.name: tensor for tensor in quantized_tensors(model)}
        # every whole tensor lies in the same memory; one of its own each would leave holes between the partitions
        largest: dict[torch.dtype, int] = {}
        for parameter in model.parameters():
            largest[parameter.dtype] = max(parameter.numel(), largest.get(parameter.dtype, 0))
        self._scratch = {d: torch.empty(numel, dtype=d, device=self.device) for d, numel in largest.items()}

    @torch.no_grad()
    def fill(self) -> None:
        done: dict[int, nn.Parameter] = {}  # meta parameter -> loaded one: a tied weight stays one parameter
        owners = [(n, m) for n, m in self.model.named_modules() if not isinstance(m, WeightQuantizer)]
        for prefix, module in owners:
            for key, empty in list(module.named_parameters(recurse=False)):
                name = f"{prefix}.{key}" if prefix else key
                if id(empty) not in done:
                    done[id(empty)] = self._load(name, empty)
                module.register_parameter(key, done[id(empty)])
            for key, buffer in module.named_buffers(recurse=False):
                name = f"{prefix}.{key}" if prefix else key
                module._buffers[key] = self._buffer(name, buffer, key not in module._non_persistent_buffers_set)
        raise_everywhere(self.error, f"rank 0 could not read {self.source.checkpoint.path}")

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Keeps an error in mind and reads no more: the other ranks wait for what is broadcast, whatever it is."""
        try:
            yield
        except Exception as error:  # whatever it is, the others must not wait for ever
            self.error = ConfigError(f"{self.source.checkpoint.path}: {name} cannot be loaded ({error})")
            self.reads = False

    def _load(self, name: str, empty: nn.Parameter) -> nn.Parameter:
        """Reads the parameter, sets its quantiser up, partitions both."""
        weight = self._scratch[empty.dtype][: empty.numel()].view(empty.shape)
        if self.reads:
            with self._reading(name):
                for index, read in self._slices(name, empty):
                    weight[index].copy_(read)
        tensor = self.quantized.get(name)
        if tensor is not None:
            self._quantizer(tensor, weight)
        parameter = nn.Parameter(weight, requires_grad=empty.requires_grad)
        self.partition(parameter)
        return parameter

    def _slices(self, name: str, empty: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """(index, what is stored there): a fused parameter expert by expert, any other whole."""
        if not names.is_fused(name):
            yield ..., self.source.weight(name)
            return
        for expert in range(empty.shape[0]):
            yield expert, self.source.weight(name, expert)

    def _quantizer(self, tensor: QuantizedTensor, weight: Tensor) -> None:
        """Scale or clip ratio from the whole weight, which rank 0 has; a learned scale is partitioned too."""
        state = {key: value for key in STATE if (value := getattr(tensor.quantizer, key)) is not None}
        full = {key: torch.empty(value.shape, dtype=value.dtype, device=self.device) for key, value in state.items()}
        if self.reads and state:
            with self._reading(tensor.name):
                self._search(tensor, weight, full)
        for key, value in full.items():
            if isinstance(state[key], nn.Parameter):
                scale = nn.Parameter(value, requires_grad=state[key].requires_grad)
                self.partition(scale)
                tensor.quantizer.register_parameter(key, scale)
            else:
                dist.broadcast(value, 0)
                setattr(tensor.quantizer, key, value)

    def _search(self, tensor: QuantizedTensor, weight: Tensor, full: Mapping[str, Tensor]) -> None:
        """Finds the state of the whole weight's quantiser, expert by expert, and puts it into `full`."""
        for expert in range(weight.shape[0]) if weight.ndim == 3 else [None]:
            part = weight if expert is None else weight[expert]
            found = slice_quantizer(tensor, expert, part, {})
            for key, value in full.items():
                (value if expert is None else value[expert]).copy_(getattr(found, key))

    def _buffer(self, name: str, buffer: Tensor, persistent: bool) -> Tensor:
        value = buffer.to(self.device, copy=True)
        if persistent:
            if self.reads:
                with self._reading(name):
                    value.copy_(self.source.weight(name))
            dist.broadcast(value, 0)
        return value


class Partitioner:
    """Partitions one parameter after the other, as if it had been built under `deepspeed.zero.Init`.

    DeepSpeed converts the first with `Init(module=…)`; every partitioned parameter then converts others, which is how
    DeepSpeed itself adds parameters later.
    """

    def __init__(self, zero_config: Mapping[str, Any]):
        deepspeed = import_deepspeed()
        stage = zero_config.get("zero_optimization", {}).get("stage")
        if stage != 3:
            raise ConfigError(f"zero_optimization.stage {stage!r} does not partition parameters; load the model whole")
        self._init = deepspeed.zero.Init
        self._config = {"train_micro_batch_size_per_gpu": 1, **zero_config}
        self._first: Any = None
        self.device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())

    def __call__(self, parameter: nn.Parameter) -> None:
        """Collective: rank 0's values are everyone's."""
        if self._first is not None:
            self._first.convert_to_zero_parameters(param_list=[parameter])
            return
        holder = nn.Module()
        holder.register_parameter("first", parameter)
        self._init(module=holder, config_dict_or_path=self._config)
        self._first = parameter
