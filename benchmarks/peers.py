"""Other people's quantisation on our model, our tokens and our recipe: AutoRound and torchao's QAT.

Both get the plain (not prepared) model and `tensors`, the mapping parameter name -> TensorScheme or None that
`plan(model, recipe).tensors` gives, so that every method quantises the same parts at the same bits wherever it can.
Each keeps its own arithmetic, and is evaluated as its own library computes it:

- AutoRound (SignRound, arXiv 2309.05516) unfuses the experts itself and covers everything. Its symmetric grid has a
  signed scale absmax / 2^(b-1), in fp16; activations are quantised by its own per-token function.
- torchao's QAT swaps nn.Linear only. Fused experts are no Linear, so they are silently left as they are and the share
  says so. `unfuse_experts` turns them into Linear layers first: what a user who noticed would do.

The libraries come with the extra `peers` and are imported when needed.
"""

import copy
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdeepseek.quant.scheme import QuantScheme
from qdeepseek.surgery import TensorScheme, is_fused_experts

Tensors = Mapping[str, TensorScheme | None]


@dataclass(frozen=True)
class PeerResult:
    """What a post-training method made.

    model    computes with quantised weights and activations, as the peer's library does; plain inputs and outputs
    weights  parameter name of the plain model -> dequantised weight
    share    quantised parameters over all parameters
    """

    model: nn.Module
    weights: dict[str, Tensor]
    share: float
    seconds: float


def autoround_weights(
    model: nn.Module,
    windows: Tensor,
    tensors: Tensors,
    seed: int,
    *,
    iters: int = 200,
    batch_size: int = 8,
    **options: Any,
) -> PeerResult:
    """AutoRound of a copy of `model`, calibrated on token windows (N, L) int64. `model` is not changed.

    options go to auto_round.AutoRound, such as enable_alg_ext=True. The global random state is left as it was.
    Raises ImportError naming the extra, ValueError for a scheme that AutoRound does not have.
    """
    os.environ.setdefault("AR_LOG_LEVEL", "WARNING")
    auto_round = _import("auto_round", "auto-round")
    layer_config = _layer_config(model, tensors)
    default = next((c for c in layer_config.values() if c["bits"] < 16), None)
    if default is None:
        raise ValueError("autoround_weights: the recipe quantises no Linear and no experts")
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        compressor = auto_round.AutoRound(
            copy.deepcopy(model).eval(),
            tokenizer=_NoPadding(),
            scheme=auto_round.schemes.QuantizationScheme.from_dict(default),
            layer_config=layer_config,
            dataset=list(windows.split(1)),
            seqlen=windows.shape[1],
            nsamples=len(windows),
            iters=iters,
            batch_size=batch_size,
            seed=seed,
            device_map="cpu",
            amp=False,
            enable_torch_compile=False,
            low_cpu_mem_usage=False,
            **options,
        )
        quantised, _ = compressor.quantize()
    weights, covered = _fused_weights(model, quantised)
    share = covered / sum(p.numel() for p in model.parameters())
    return PeerResult(quantised, weights, share, time.perf_counter() - start)


class _NoPadding:
    """AutoRound wants a tokenizer beside a model in memory, to find padding; full windows have none."""

    pad_token = "<none>"
    pad_token_id = -1


def _layer_config(model: nn.Module, tensors: Tensors) -> dict[str, dict[str, Any]]:
    """AutoRound's settings for every Linear, and for every expert's three projections under unfused names."""
    config: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            config[name] = _autoround_scheme(tensors.get(f"{name}.weight"), name)
        elif is_fused_experts(module):
            for leaf, parameter in (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj",) * 2):
                scheme = _autoround_scheme(tensors.get(f"{name}.{parameter}"), f"{name}.{parameter}")
                for e in range(module.down_proj.shape[0]):
                    config[f"{name}.{e}.{leaf}"] = dict(scheme)
    return config


def _autoround_scheme(scheme: TensorScheme | None, name: str) -> dict[str, Any]:
    if scheme is None:
        return {"bits": 16, "act_bits": 16}
    weight, activation = scheme.weight, scheme.input_of(name)
    if weight.granularity == "per_tensor":
        raise ValueError(f"autoround: {name} has granularity per_tensor; use per_group or per_channel")
    config = {"bits": weight.bits, "group_size": weight.group_size or -1, "sym": weight.symmetric, "data_type": "int"}
    if activation is None:
        return config
    return config | {
        "act_bits": activation.bits, "act_group_size": -1, "act_sym": activation.symmetric, "act_dynamic": True,
        "act_data_type": "int",
    }  # fmt: skip


def _fused_weights(model: nn.Module, quantised: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Dequantised weights under the plain model's parameter names, and how many of them AutoRound quantised."""
    found = {name.replace(".orig_layer", ""): p.detach() for name, p in quantised.named_parameters()}
    linears = [module for module in quantised.modules() if isinstance(module, nn.Linear)]
    covered = sum(linear.weight.numel() for linear in linears if hasattr(linear, "scale"))
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name in found:
            weights[name] = found[name]
            continue
        prefix, _, leaf = name.rpartition(".")
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        experts = range(parameter.shape[0])
        rows = [torch.cat([found[f"{prefix}.{e}.{key}.weight"] for key in leaves]) for e in experts]
        weights[name] = torch.stack(rows)
    return weights, covered


class UnfusedExperts(nn.Module):
    """The same experts as Linear layers, one gate_up and one down each, in a loop."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.act_fn = experts.act_fn
        self.gate_up = nn.ModuleList(_linear(w) for w in experts.gate_up_proj.detach())
        self.down = nn.ModuleList(_linear(w) for w in experts.down_proj.detach())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for e in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == e)
            gate, up = self.gate_up[e](hidden_states[token]).chunk(2, -1)
            y = self.down[e](self.act_fn(gate) * up) * top_k_weights[token, slot, None]
            output = output.index_add(0, token, y.to(output.dtype))
        return output


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.clone())
    return linear


def unfuse_experts(model: nn.Module, tensors: Tensors) -> dict[str, TensorScheme | None]:
    """Replaces fused experts by `UnfusedExperts`, in place; returns `tensors` under the new parameter names."""
    renamed = dict(tensors)
    for name, module in list(model.named_modules()):
        if is_fused_experts(module):
            unfused = UnfusedExperts(module)
            model.set_submodule(name, unfused)
            for leaf, parameter in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
                scheme = renamed.pop(f"{name}.{parameter}")
                for e in range(len(unfused.down)):
                    renamed[f"{name}.{leaf}.{e}.weight"] = scheme
    return renamed


def torchao_prepare(model: nn.Module, tensors: Tensors) -> tuple[nn.Module, float]:
    """torchao's QAT on every planned Linear, in place: (model, share of all parameters that it covers).

    W4A16, W3, W2 and W8 come from IntxWeightOnlyConfig, 8-bit activations from Int8DynamicActivationIntxWeightConfig,
    both of which `torchao_convert` turns into integers; 4-bit activations exist as fake-quant only.
    """
    ao = _import("torchao.quantization", "torchao")
    qat = _import("torchao.quantization.qat", "torchao")
    total = sum(p.numel() for p in model.parameters())
    covered = 0
    for (weight, activation), names in _linears(model, tensors).items():
        base = _torchao_base(ao, weight, activation)
        if base is not None:
            config = qat.QATConfig(base, step="prepare")
        else:
            config = qat.QATConfig(**_torchao_fake(qat, weight, activation), step="prepare")
        ao.quantize_(model, config, lambda module, name, names=names: name in names)
        modules: list[Any] = [model.get_submodule(name) for name in names]
        covered += sum(module.weight.numel() for module in modules)
    return model, covered / total


def torchao_convert(model: nn.Module, tensors: Tensors) -> nn.Module:
    """Integers in place of fake-quant, in place; layers with 4-bit activations stay fake-quantised (no such kernel)."""
    ao = _import("torchao.quantization", "torchao")
    qat = _import("torchao.quantization.qat", "torchao")
    for (weight, activation), names in _linears(model, tensors).items():
        base = _torchao_base(ao, weight, activation)
        if base is not None:
            config = qat.QATConfig(base, step="convert")
            ao.quantize_(model, config, lambda module, name, names=names: name in names)
    return model


def _linears(model: nn.Module, tensors: Tensors) -> dict[tuple[QuantScheme, QuantScheme | None], set[str]]:
    """(weight scheme, activation scheme) -> names of the Linear modules planned that way."""
    groups: dict[tuple[QuantScheme, QuantScheme | None], set[str]] = {}
    for name, module in model.named_modules():
        scheme = tensors.get(f"{name}.weight")
        if isinstance(module, nn.Linear) and scheme is not None:
            leaf = "down_proj" if ".down." in name else name
            groups.setdefault((scheme.weight, scheme.input_of(leaf)), set()).add(name)
    return groups


def _torchao_base(ao: Any, weight: QuantScheme, activation: QuantScheme | None) -> Any:
    """torchao's post-training config of this scheme, None where it has none."""
    if weight.granularity == "per_tensor":
        raise ValueError("torchao: granularity per_tensor is not offered; use per_group or per_channel")
    granularity = ao.PerGroup(weight.group_size) if weight.group_size else ao.PerAxis(0)
    mapping = ao.MappingType.SYMMETRIC if weight.symmetric else ao.MappingType.ASYMMETRIC
    if activation is None:
        return ao.IntxWeightOnlyConfig(_int(weight.bits), granularity, mapping)
    if activation.bits == 8:
        return ao.Int8DynamicActivationIntxWeightConfig(_int(weight.bits), granularity, mapping)
    return None


def _torchao_fake(qat: Any, weight: QuantScheme, activation: QuantScheme | None) -> dict[str, Any]:
    """The scheme as torchao's fake-quant alone; its per-token activations are asymmetric only."""
    assert activation is not None
    group = {"group_size": weight.group_size} if weight.group_size else {"granularity": "per_channel"}
    return {
        "activation_config": qat.IntxFakeQuantizeConfig(_int(activation.bits), "per_token", is_symmetric=False),
        "weight_config": qat.IntxFakeQuantizeConfig(_int(weight.bits), is_symmetric=weight.symmetric, **group),
    }


def _int(bits: int) -> torch.dtype:
    return getattr(torch, f"int{bits}")


def _import(module: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{package} is not installed; pip install 'qdeepseek[peers]' brings it ({error})") from error
