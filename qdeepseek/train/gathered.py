"""Saves a model whose parameters are partitioned (ZeRO-3), one parameter at a time.

Every rank gathers each parameter in model order; rank 0 streams it into shards under the original checkpoint's names,
one tensor for each expert, and writes what `save_pretrained` writes beside them. Memory beyond the partitions: one
parameter on every rank, one shard on rank 0. Adapters are merged on the way: W' = W + s·B·A (layers/low_rank.py).

A gather needs all ranks. When rank 0 cannot write (a full disk) it goes on gathering with the others, and the error is
raised on all of them at the end; else they would wait for ever.
"""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qdeepseek.export import names
from qdeepseek.export.names import Layout
from qdeepseek.export.writer import ShardWriter
from qdeepseek.surgery import is_fused_experts, quantized_tensors
from qdeepseek.train.adapters import AdaptedParameter, adapters
from qdeepseek.train.everywhere import raise_everywhere
from qdeepseek.train.zero import gathered


def save_gathered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Writes a partitioned model without quantisers as a `save_pretrained` folder, whole or not at all.

    Collective. Raises ValueError for a model with quantisers, OSError on every rank when rank 0 cannot write.
    """
    quantized = next(quantized_tensors(model), None)
    if quantized is not None:
        raise ValueError(f"{quantized.name} is quantised; export the model, or call surgery.restore before saving it")
    layout = names.layout_of(
        str(model.config.model_type), fused=any(is_fused_experts(module) for module in model.modules())
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    sink = _Sink(folder, max_shard_bytes) if not dist.is_initialized() or dist.get_rank() == 0 else None
    for name, tensor in whole_tensors(model):
        if sink is not None:
            sink.add(name, tensor, layout)
    if sink is not None:
        sink.finish(model, tokenizer)
    raise_everywhere(sink.error if sink is not None else None, "rank 0 could not save the model")


@torch.no_grad()
def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every parameter and persistent buffer, a tied one once, adapters merged; collective.

    A parameter is whole only until the next is asked for.
    """
    wrappers = {id(wrapper.get_param()): wrapper for wrapper in adapters(model)}
    seen = {id(p) for w in wrappers.values() for part in (w.lora_A, w.lora_B) for p in part.parameters()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        wrapper = wrappers.get(id(tensor))
        with gathered(_parts(tensor, wrapper)):
            yield name.replace(".base_layer", ""), tensor.detach() if wrapper is None else wrapper.adapted()


def _parts(tensor: Tensor, wrapper: AdaptedParameter | None) -> list[Tensor]:
    if wrapper is None:
        return [tensor]
    return [tensor, *wrapper.lora_A.parameters(), *wrapper.lora_B.parameters()]


class _Sink:
    """Rank 0's side: writes until an OSError, and remembers it."""

    def __init__(self, folder: Path, max_shard_bytes: int):
        self.folder, self.temporary = folder, folder.with_name(folder.name + ".partial")
        self.error: OSError | None = None
        shutil.rmtree(self.temporary, ignore_errors=True)
        self._attempt(self.temporary.mkdir)
        self._shards = ShardWriter(self.temporary, max_shard_bytes)

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        if self.error is not None:
            return
        try:
            action(*arguments)
        except OSError as error:
            self.error = error

    def add(self, name: str, tensor: Tensor, layout: Layout) -> None:
        if not names.is_fused(name):
            self._attempt(self._shards.add, names.to_checkpoint(name, layout), tensor)
            return
        for expert, weight in enumerate(tensor):
            for part in names.parts_of(name):
                module = names.expert_module(name, expert, part, layout)
                self._attempt(self._shards.add, f"{module}.weight", names.rows_of(part, weight))

    def finish(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._attempt(self._shards.finish)
        self._attempt(self._write_companions, model, tokenizer)
        self._attempt(self._publish)

    def _write_companions(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        config: Any = copy.deepcopy(model.config)
        config.dtype, config.architectures = str(model.dtype).removeprefix("torch."), [type(model).__name__]
        config.save_pretrained(self.temporary)
        if model.can_generate():
            model.generation_config.save_pretrained(self.temporary)
        tokenizer.save_pretrained(self.temporary)

    def _publish(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.temporary.rename(self.folder)
