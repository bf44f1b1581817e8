"""Where in a model the first non-finite number appears: one forward and backward, watched module by module.

Three looks, in the order in which a number travels:
    weight     a parameter or buffer that is already non-finite
    forward    the first module whose output is non-finite; if that was finite everywhere before, but the input of
               module M is not, the number was made between modules, in the parent of M (a softmax, a residual sum)
    backward   the first module whose gradient (of its input or of its parameters) is non-finite while the gradient
               of its output was finite; made between modules: the parent

A module takes part with an alias of its input, so that the gradient it sends back is seen before it is summed with
those of the other consumers (q, k and v read one tensor). Quantisers are not watched: what happens in them is the
layer's that owns them. Every check waits for the device; this is for the rare step that has failed, not for the loop.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdeepseek.layers import ActivationQuantizer, WeightQuantizer

QUANTIZERS = (WeightQuantizer, ActivationQuantizer)


@dataclass(frozen=True)
class Fault:
    """`module` (a name in the model, "" for the model itself), `where` weight, forward or backward, and what it was."""

    module: str
    where: str
    what: str


def is_finite(tensor: Tensor) -> bool:
    """True for integers and for floating tensors without inf and NaN; waits for the device."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _owner(model: nn.Module, tensor_name: str) -> str:
    """Module that owns a parameter or buffer; of a quantiser's, the layer."""
    name = _parent(tensor_name)
    return _parent(name) if isinstance(model.get_submodule(name), QUANTIZERS) else name


def nonfinite_tensor(model: nn.Module) -> Fault | None:
    """The first parameter or saved buffer that holds inf or NaN; of one that ZeRO-3 splits, in this rank's part."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and not is_finite(getattr(tensor, "ds_tensor", tensor).detach()):
            return Fault(_owner(model, name), "weight", name)
    return None


class _Watch:
    """Hooks on every module and parameter; `first` is the first non-finite tensor that passed one of them."""

    def __init__(self, model: nn.Module):
        self.model, self.first = model, None

    first: Fault | None

    def see(self, tensor: Tensor, module: str, where: str, what: str) -> None:
        if self.first is None and not is_finite(tensor):
            self.first = Fault(module, where, what)

    def alias_inputs(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(self.alias(x, name) if isinstance(x, Tensor) else x for x in args)

        return hook

    def alias(self, x: Tensor, name: str) -> Tensor:
        self.see(x, _parent(name), "forward", f"input of {name}")
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        x = x.view_as(x)
        x.register_hook(lambda grad: self.see(grad, name, "backward", "gradient of its input"))
        return x

    def outputs(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for y in output if isinstance(output, tuple | list) else (output,):
                if not isinstance(y, Tensor):
                    continue
                self.see(y, name, "forward", "its output")
                if y.requires_grad:
                    y.register_hook(
                        lambda grad: self.see(grad, _parent(name), "backward", f"gradient of the output of {name}")
                    )

        return hook

    def parameter(self, name: str) -> Callable[[Tensor], Tensor]:
        owner = _owner(self.model, name)

        def hook(grad: Tensor) -> Tensor:
            self.see(grad, owner, "backward", f"gradient of {name}")
            return grad.new_zeros(()).expand_as(grad)  # no second set of gradients in memory

        return hook

    @contextmanager
    def on(self) -> Iterator[None]:
        handles = []
        for name, module in self.model.named_modules():
            if name and not isinstance(module, QUANTIZERS):
                handles.append(module.register_forward_pre_hook(self.alias_inputs(name)))
                handles.append(module.register_forward_hook(self.outputs(name)))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_hook(self.parameter(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def find_fault(model: nn.Module, loss: Callable[[], Tensor], to_the_end: bool = False) -> Fault | None:
    """The first non-finite number of `loss()` and its backward, or None when everything is finite.

    `loss` runs the model and returns a scalar. Gradients (`.grad`) are left alone. A loss that is non-finite while
    all modules were finite is Fault("", "forward", "loss").

    to_the_end: run the backward after a finding too, where other ranks wait for this one in it (ZeRO-3).
    """
    watch = _Watch(model)
    with watch.on(), torch.enable_grad():
        value = loss()
        if watch.first is None and not is_finite(value):
            watch.first = Fault("", "forward", "loss")
        trained = [p for p in model.parameters() if p.requires_grad]
        if (to_the_end or watch.first is None) and value.requires_grad:
            torch.autograd.grad(value, trained, allow_unused=True)
    return watch.first
