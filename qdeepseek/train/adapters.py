"""LoRA adapters of peft on the weights themselves, so that fake-quant acts on W' = W + s·B·A (layers/low_rank.py).

peft injects the adapters in place (`target_parameters`; a Linear's `weight`, fused experts' `gate_up_proj` and
`down_proj`): the model stays the object that it was, its adapted modules are wrapped, names get a `.base_layer`. What
is ours is the wrapper's forward. peft's own registers a parametrisation at every call, which changes the module's
class, computes W' twice, and rounds it otherwise than its `merge` does (`baddbmm` against `einsum` and add). Here W' is
lent to the base module for the call (`functional_call`), and `merge` writes the very same W'.

A weight computed in the forward is another tensor each time, so `WeightQuantizer.cache` does not apply to it. With
`recompute` W' and its quantised form live for one layer's forward and are computed again in its backward
(non-reentrant checkpoint, which stops before the last matmul); under gradient checkpointing that is so anyway.

The folder of `save` is an ordinary peft adapter. It names `target_modules` where the model has no fused experts; where
it has, `target_parameters` alone, since peft takes a Linear's `gate_proj` there for an expert's and rewrites it.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from qdeepseek.layers.low_rank import add_low_rank
from qdeepseek.surgery import is_fused_experts, part_of
from qdeepseek.train.config import ConfigError

NAME = "default"  # the one adapter; peft's own default name
PARTS = ("attention", "mlp", "shared_experts", "routed_experts")
EXPERTS = ("gate_up_proj", "down_proj")


class AdaptedParameter(ParamWrapper):
    """peft's wrapper of one parameter, with W' lent to the base module instead of a parametrisation.

    A and B stay in fp32 whatever the model is cast to: steps of 1e-4 vanish in bf16.
    """

    _z3_leaf = True  # ZeRO-3 gathers W, A and B when the wrapper is entered: inside, the layer's weight is no parameter

    recompute: bool = False

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """a (R, I) or (E, R, I), b (O, R) or (E, O, R), s; peft keeps an expert's B in every E-th column."""
        a, b = (getattr(part, NAME).weight for part in (self.lora_A, self.lora_B))
        s = float(self.scaling[NAME])
        return *by_expert(a, b, int(self.num_experts) if self.get_param().ndim == 3 else None), s

    def adapted(self) -> Tensor:
        """W', like W."""
        return add_low_rank(self.get_param(), *self.factors())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # saved-tensor hooks that are in place belong to gradient checkpointing or offloading: W' is not kept there
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if not self.recompute or not torch.is_grad_enabled() or hooked:
            return self._lend(*args, **kwargs)
        return checkpoint(self._lend, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _lend(self, *args: Any, **kwargs: Any) -> Tensor:
        path, module = self.parameter_name, self.base_layer
        while isinstance(module, ParamWrapper):  # experts have a wrapper for each of their two parameters
            path, module = f"base_layer.{path}", module.base_layer
        return functional_call(self.base_layer, {path: self.adapted()}, args, kwargs, tie_weights=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "AdaptedParameter":
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        self.base_layer._apply(fn, recurse)
        for part in (self.lora_A, self.lora_B):
            part._apply(move, recurse)
        return self


def by_expert(a: Tensor, b: Tensor, experts: int | None) -> tuple[Tensor, Tensor]:
    """peft's A and B of one parameter as a (E, R, I), b (E, O, R); as they are where there are no experts."""
    if experts is None:
        return a, b
    return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)


def targets_of(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Names of the parameters that `targets` mean, in model order; None is every part that the model has.

    A target is a part (attention, mlp, shared_experts, routed_experts) or the end of a module's name in one of them,
    such as `q_proj` or `layers.3.mlp.experts`. Raises ConfigError for a target that means nothing.
    """
    found = dict(_candidates(model))
    if targets is None:
        return [name for names, _ in found.values() for name in names]
    chosen: set[str] = set()
    for target in targets:
        hits = {m for m, (_, part) in found.items() if part == target or f".{m}".endswith(f".{target}")}
        if not hits:
            parts = sorted({part for _, part in found.values()})
            ends = sorted({m.rpartition(".")[2] for m in found if not m.rpartition(".")[2].isdigit()})
            raise ConfigError(
                f"method.lora.targets: {target!r} means nothing in this model (routers, norms, embeddings and the head "
                f"take no adapter); use null for every part, a part of {', '.join(parts)}, or the end of a module's "
                f"name, of {', '.join(ends)}"
            )
        chosen |= hits
    return [name for module, (names, _) in found.items() if module in chosen for name in names]


def _candidates(model: nn.Module) -> Iterator[tuple[str, tuple[list[str], str]]]:
    """Module name, and the parameters of it that can be adapted with its part."""
    for name, module in model.named_modules():
        part = part_of(name, module) if name else "other"
        if part not in PARTS:
            continue
        if is_fused_experts(module):
            yield name, ([f"{name}.{key}" for key in EXPERTS], part)
        elif isinstance(module, nn.Linear):
            yield name, ([f"{name}.weight"], part)


def short_names(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Names without their layer where that still means the same parameters, as people write them for peft."""
    ends = {re.sub(r".*\blayers\.\d+\.", "", name) for name in names}
    also = [name for name in others if name not in set(names) and any(f".{name}".endswith(f".{e}") for e in ends)]
    return sorted(names if also else ends)


def inject(model: nn.Module, targets: Sequence[str] | None, rank: int, alpha: int) -> list[AdaptedParameter]:
    """Puts adapters into `model` in place: A random, B zero, everything else frozen. Returns the wrappers.

    Raises ConfigError for targets that mean nothing.
    """
    names = targets_of(model, targets)
    every = [name for name, _ in model.named_parameters()]
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=[], target_parameters=short_names(names, every), task_type="CAUSAL_LM"
    )
    inject_adapter_in_model(config, model)
    for wrapper in (m for m in model.modules() if isinstance(m, ParamWrapper)):
        wrapper.__class__ = AdaptedParameter
        wrapper.lora_A.float(), wrapper.lora_B.float()
    return adapters(model)


def adapters(model: nn.Module) -> list[AdaptedParameter]:
    """The adapted parameters of `model`; none without adapters."""
    return [module for module in model.modules() if isinstance(module, AdaptedParameter)]


def save(model: nn.Module, folder: Path, base: str) -> None:
    """Writes A and B as a peft adapter folder; `base` is the model that they are added to."""
    config: Any = copy(model.peft_config[NAME])  # type: ignore[index]
    config.target_parameters = sorted(config.target_parameters or ())
    if not any(is_fused_experts(module) for module in model.modules()):
        config.target_modules = {name.removesuffix(".weight") for name in config.target_parameters}
        config.target_parameters = None
    config.base_model_name_or_path, config.inference_mode = base, True
    temporary = folder.with_name(folder.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {f"base_model.model.{key}": value.detach().cpu().contiguous() for key, value in state.items()}
    save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def check_folder(folder: Path, rank: int, alpha: int) -> None:
    """Raises ConfigError unless `folder` is a LoRA adapter of this rank and alpha."""
    where = f"method.lora.adapter {folder}"
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{where}: no adapter_config.json in it; give a peft adapter folder")
    config: Any = PeftConfig.from_pretrained(str(folder))
    if not isinstance(config, LoraConfig):
        raise ConfigError(f"{where}: a {config.peft_type} adapter; only LoRA can be continued")
    odd = [key for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if getattr(config, key)]
    if odd:
        raise ConfigError(f"{where}: {', '.join(odd)} is set, which adapters here do not have; merge it instead")
    for key, mine, its in (("rank", rank, config.r), ("alpha", alpha, config.lora_alpha)):
        if mine != its:
            raise ConfigError(f"{where}: its {key} is {its}, method.lora.{key} is {mine}; set the same")


def load(model: nn.Module, folder: Path) -> None:
    """Gives the injected adapters the A and B of a peft folder.

    Raises ConfigError unless the folder has exactly the adapters that the model has.
    """
    state = load_peft_weights(str(folder), device="cpu")
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    shapes = {key.removeprefix("base_model.model."): tuple(value.shape) for key, value in state.items()}
    wrong = sorted(
        key for key in own.keys() | shapes.keys() if key not in own or tuple(own[key].shape) != shapes.get(key)
    )
    if wrong:
        raise ConfigError(
            f"method.lora.adapter {folder}: {len(wrong)} of its tensors and of method.lora.targets differ, first "
            f"{wrong[0]}; give the targets and the base model that it was trained with"
        )
    set_peft_model_state_dict(model, state)


@torch.no_grad()
def merge(model: nn.Module, device: torch.device | None = None) -> None:
    """Writes W' into W and takes the adapters out: plain Parameters under their own names again.

    device: where W' is computed, weight by weight; that of training, so that it has the bits of training.
    """
    for wrapper in adapters(model):
        weight = wrapper.get_param()
        home = weight.device
        a, b, s = wrapper.factors()
        there = device or home
        weight.data = add_low_rank(weight.to(there), a.to(there), b.to(there), s).to(home)
    remove(model)


def remove(model: nn.Module) -> None:
    """Takes the adapters out without merging; everything is trainable again."""
    for name, module in _outermost(model):
        model.set_submodule(name, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    model.requires_grad_(True)


def _outermost(model: nn.Module) -> list[tuple[str, AdaptedParameter]]:
    """Wrappers that stand where the model's own modules were, by those modules' names."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, AdaptedParameter)]
    return [(name, m) for name, m in found if not name.endswith(".base_layer")]


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """`model` as it would be merged, for the time of saving it; afterwards exactly what it was."""
    wrappers = adapters(model)
    outer = dict(_outermost(model))
    before = [(w.get_param(), w.get_param().data) for w in wrappers]
    config = model.__dict__.pop("peft_config", None)
    try:
        with torch.no_grad():
            for wrapper, (parameter, _) in zip(wrappers, before, strict=True):
                parameter.data = wrapper.adapted()
        for name, module in outer.items():
            model.set_submodule(name, module.get_base_layer())
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
        for name, module in outer.items():
            model.set_submodule(name, module)
        if config is not None:
            model.peft_config = config
