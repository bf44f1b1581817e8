"""What the routers of a model put out during one forward, by hooks, without changing it.

Non-reentrant gradient checkpointing runs the forward with gradients and repeats it in the backward, to refill saved
tensors: the logits of the first run are the ones in the graph, and recording is over when the repetition comes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RouterTap:
    """Records logits (T, E) and chosen experts (T, K) of `routers` in order while `record()` is entered.

    Args:
        routers: name -> router (routing/routers.py).
        on_logits: called with (row, logits) of each recorded forward; None expects a forward without gradient.
    """

    def __init__(self, routers: dict[str, nn.Module], on_logits: Callable[[int, Tensor], None] | None = None):
        self.routers, self.on_logits = routers, on_logits
        self.outputs: dict[int, tuple[Tensor, Tensor]] = {}  # by row
        self._recording = False
        self._handles = [m.register_forward_hook(self._hook(r, n)) for r, (n, m) in enumerate(routers.items())]

    def _hook(self, row: int, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            if not self._recording:
                return
            logits_TE, _, indices_TK = output
            self.outputs[row] = (logits_TE, indices_TK)
            if self.on_logits is not None:
                if not torch.is_grad_enabled():
                    raise RuntimeError(
                        f"{name} ran without gradients in a training step: gradient checkpointing is reentrant; "
                        f"enable it with use_reentrant=False"
                    )
                self.on_logits(row, logits_TE)

        return keep

    @contextmanager
    def record(self) -> Iterator[None]:
        """Forget what was recorded before, and record until left."""
        self.outputs = {}
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def remove(self) -> None:
        """Take the hooks off and forget."""
        for handle in self._handles:
            handle.remove()
        self.outputs = {}
