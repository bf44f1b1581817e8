"""Swaps modules of a model in place for ones that compute with quantised weights, and swaps them back.

    Linear -> QuantLinear     Embedding -> QuantEmbedding     fused experts: quantisers attached, forward chosen by name

Parameters are shared, never copied (except a tied weight that the recipe unties), so optimisers, checkpoints and
`state_dict` keys of weights stay as they were. Fused experts are reached through transformers' experts interface: the
config's `_experts_implementation` selects `qdeepseek_grouped_mm` (default), `qdeepseek_batched_mm` or
`qdeepseek_eager`. Works on the meta device, where scales are left uninitialised.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from qdeepseek.layers import (
    ActivationQuantizer,
    QuantEmbedding,
    QuantLinear,
    WeightQuantizer,
    attach_expert_quantizers,
    detach_expert_quantizers,
    has_expert_quantizers,
    naive_experts_forward,
    quant_experts_forward,
)
from qdeepseek.quant import QuantScheme
from qdeepseek.surgery.coverage import Coverage
from qdeepseek.surgery.families import is_fused_experts
from qdeepseek.surgery.kv_cache import detach_kv_cache
from qdeepseek.surgery.plan import Assignment, assign, coverage_of
from qdeepseek.surgery.recipe import Recipe, TensorScheme

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")


@dataclass(frozen=True)
class QuantizedTensor:
    """One quantised weight of a prepared model.

    name          parameter name, such as `model.layers.1.mlp.experts.gate_up_proj` or `....o_proj.weight`
    module_name   the module that owns it
    weight        the trained, unquantised weight; `quantizer.quantize(weight)` gives what is served
    scheme        format of the weight (`quantizer.scheme`)
    input         format of the activation that meets it, None for 16 bits
    """

    name: str
    module_name: str
    module: nn.Module
    weight: nn.Parameter
    quantizer: WeightQuantizer
    scheme: QuantScheme
    input: QuantScheme | None


def prepare(model: nn.Module, recipe: Recipe, *, initialize: bool = True, experts: str = "grouped_mm") -> Coverage:
    """Quantises `model` by `recipe`, in place, and returns the coverage. Undone by `restore`.

    initialize  find learned scales and clip ratios from the weights now; False leaves that to a checkpoint or to
                `initialize_quantizers` (always left on the meta device)
    experts     which matrix multiplication routed experts use: grouped_mm | batched_mm | eager

    Raises CoverageError (see `plan`) before anything is changed, ValueError for a model that is prepared already.
    """
    if experts not in EXPERTS_IMPLEMENTATIONS:
        raise ValueError(f"experts {experts!r} is not one of {', '.join(EXPERTS_IMPLEMENTATIONS)}")
    already = next(quantized_tensors(model), None)
    if already is not None:
        raise ValueError(f"{already.name} is quantised already; call restore(model) before preparing it again")
    assignments = assign(model, recipe)
    coverage = coverage_of(assignments, recipe)
    if recipe.untie:
        untie(model)
    for assignment in assignments:
        if assignment.scheme is not None:
            _swap(model, assignment, assignment.scheme)
    _select_experts_implementation(model, f"qdeepseek_{experts}")
    if initialize:
        initialize_quantizers(model)
    return coverage


def restore(model: nn.Module) -> None:
    """Puts stock modules back around the (trained) Parameters; a weight untied by the recipe stays untied."""
    detach_kv_cache(model)
    restore_weights(model)


def restore_weights(model: nn.Module) -> None:
    """`restore` that leaves quantisers of the KV cache where they are."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            model.set_submodule(name, module.to_linear())
        elif isinstance(module, QuantEmbedding):
            model.set_submodule(name, module.to_embedding())
        elif has_expert_quantizers(module):
            detach_expert_quantizers(module)
            config: Any = module.config
            config._experts_implementation = module.__dict__.pop("stock_experts_implementation")


def initialize_quantizers(model: nn.Module) -> None:
    """Sets learned scales and clip ratios of a prepared model from its present weights."""
    for tensor in quantized_tensors(model):
        if tensor.weight.device.type != "meta":
            tensor.quantizer.initialize(tensor.weight)


def quantized_tensors(model: nn.Module) -> Iterator[QuantizedTensor]:
    """The quantised weights of a prepared model, in model order; none for a model that is not prepared.

    Under LoRA names are those of the model without adapters (peft puts `.base_layer` in), `weight` is the frozen one.
    """
    for name, module in model.named_modules():
        name = name.replace(".base_layer", "")
        prefix = f"{name}." if name else ""
        if isinstance(module, QuantLinear | QuantEmbedding):
            activation = getattr(module, "input_quantizer", None)
            found = [("weight", module.weight_quantizer, activation)]
        elif has_expert_quantizers(module):
            found = [
                ("gate_up_proj", module.gate_up_proj_quantizer, module.input_quantizer),
                ("down_proj", module.down_proj_quantizer, module.down_input_quantizer),
            ]
        else:
            continue
        for key, quantizer, activation in found:
            yield QuantizedTensor(
                name=prefix + key, module_name=name, module=module, weight=getattr(module, key), quantizer=quantizer,
                scheme=quantizer.scheme, input=activation.scheme if activation is not None else None,
            )  # fmt: skip


def untie(model: nn.Module) -> bool:
    """Gives the output layer its own copy of a weight that it shares with the input embedding; False if it had one."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if head is None or head.weight is not embedding.weight:
        return False
    tied = {name for name, p in model.named_parameters(remove_duplicate=False) if p is head.weight}
    head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=embedding.weight.requires_grad)
    model.config.tie_word_embeddings = False  # type: ignore[union-attr]
    # transformers fills this map {target: source} once; left as it is, save_pretrained would drop the head again
    ties: Any = getattr(model, "all_tied_weights_keys", {})
    for target in tied & set(ties):
        del ties[target]
    return True


def _swap(model: nn.Module, assignment: Assignment, scheme: TensorScheme) -> None:
    name, module = assignment.name, assignment.module
    if is_fused_experts(module):
        weights = {key: getattr(module, key) for key in ("gate_up_proj", "down_proj")}
        gate_up, down = (
            WeightQuantizer(
                scheme.weight, scheme.method, w.shape, device=w.device, name=f"{name}.{key}",
                row_blocks=2 if key == "gate_up_proj" else 1,
            )
            for key, w in weights.items()
        )  # fmt: skip
        inputs = (_activation(scheme.input), _activation(scheme.input_of("down_proj")))
        attach_expert_quantizers(module, gate_up, down, *inputs)
        return
    assert isinstance(module, nn.Linear | nn.Embedding)
    weight = module.weight
    quantizer = WeightQuantizer(scheme.weight, scheme.method, weight.shape, device=weight.device, name=name)
    if isinstance(module, nn.Linear):
        model.set_submodule(name, QuantLinear.from_linear(module, quantizer, _activation(scheme.input_of(name))))
    else:
        model.set_submodule(name, QuantEmbedding.from_embedding(module, quantizer))


def _activation(scheme: QuantScheme | None) -> ActivationQuantizer | None:
    return None if scheme is None else ActivationQuantizer(scheme)


def _select_experts_implementation(model: nn.Module, name: str) -> None:
    quantised = [module for module in model.modules() if has_expert_quantizers(module)]
    if not quantised:
        return
    register_experts_implementations()
    for module in quantised:  # all are read before any is written: the layers share one config
        module.stock_experts_implementation = module.config._experts_implementation  # type: ignore[union-attr]
    for module in quantised:
        module.config._experts_implementation = name  # type: ignore[union-attr]


def autocast_experts(model: nn.Module) -> None:
    """Let fused experts of an unquantised model obey autocast, which transformers' own functions do not; without
    autocast they compute the same bits. `config.json` does not hold the choice."""
    register_experts_implementations()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if is_fused_experts(module) and getattr(config, "_experts_implementation", None) in (
            "grouped_mm",
            "batched_mm",
        ):
            config._experts_implementation = f"qdeepseek_{config._experts_implementation}"


def register_experts_implementations() -> None:
    """Adds the `qdeepseek_*` names to transformers' experts interface; harmless when repeated."""
    from transformers.integrations import moe

    forwards = {
        "qdeepseek_grouped_mm": quant_experts_forward(moe.grouped_mm_experts_forward, "expert"),
        "qdeepseek_batched_mm": quant_experts_forward(moe.batched_mm_experts_forward, "token"),
        "qdeepseek_eager": naive_experts_forward,
    }
    for name, forward in forwards.items():
        moe.ALL_EXPERTS_FUNCTIONS.register(name, forward)
