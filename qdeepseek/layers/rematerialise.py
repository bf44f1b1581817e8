"""Rebuild w_hat in the backward instead of keeping it: one fake-quant more a forward, one copy of the weight less.

A matmul saves its weight for the gradient of its input.  Of a plain layer that is the Parameter, which exists
anyway; of a quantised one it is w_hat, so that training holds a second copy of all weights.  Within
`rematerialise(...)` what autograd saves of w_hat, or of its cast under autocast, is a note (which quantiser, weight,
dtype, view) from which it is computed again when the backward asks for it.  Does nothing when the quantiser's
`recompute` is off, when its cache holds w_hat in any case, and when somebody else handles saved tensors (gradient
checkpointing, offloading): there w_hat lives no longer than its layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qdeepseek.layers.weight_quantizer import WeightQuantizer


class _Note(NamedTuple):
    """Where a saved view of w_hat comes from."""

    quantizer: WeightQuantizer
    weight: Tensor
    key: tuple[Any, ...]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _rebuild(note: _Note) -> Tensor:
    if note.quantizer.key(note.weight) != note.key:
        raise RuntimeError(
            "a quantised weight or its scale was changed between forward and backward, so that w_hat cannot be "
            "computed again; run the backward before the optimiser step, or set recompute = False on the quantiser"
        )
    with torch.no_grad():
        return note.quantizer(note.weight).to(note.dtype).as_strided(note.size, note.stride, note.offset)


@contextmanager
def rematerialise(*triples: tuple[WeightQuantizer, Tensor, Tensor]) -> Iterator[None]:
    """Around a matmul with w_hat: triples of (quantiser, weight, w_hat as the matmul takes it, cast or not)."""
    mine = {
        w_hat.untyped_storage().data_ptr(): (quantizer, w, quantizer.key(w), w_hat.dtype)
        for quantizer, w, w_hat in triples
        if quantizer.recompute and not quantizer.cache and w_hat is not w
    }
    if not mine or not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True):
        yield
        return

    def pack(tensor: Tensor) -> Tensor | _Note:
        source = mine.get(tensor.untyped_storage().data_ptr())
        if source is None or tensor.dtype != source[-1]:
            return tensor
        return _Note(*source, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(saved: Tensor | _Note) -> Tensor:
        return _rebuild(saved) if isinstance(saved, _Note) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
