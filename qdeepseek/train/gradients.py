"""Sums over the gradients of a step where a strategy leaves no `.grad` behind: DeepSpeed's ZeRO, from stage 1 on.

A hook on every parameter sees the gradient of this rank's micro-batch, whole in all stages, before it is reduced:

    sums[-1, i] = Σ_micro ‖g_i‖²        sums[0, i] = Σ_micro Σ g_i, with `means`

Σ g over ranks and micro-batches is that of the reduced gradient; Σ ‖g‖² is not ‖Σ g‖², but larger by the spread between
micro-batches: a statistic with a history of its own, and non-finite whenever a gradient is. A reduction a gradient for
each row, no collective, no wait for the device.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class LocalMoments:
    """Hooks that add up moments of the gradients of `parameters` while `counting`.

    means: also of the gradients themselves. sums: (2 or 1, parameters) in fp64.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, means: bool = False):
        kept = list(parameters)
        self.sums = torch.zeros(2 if means else 1, len(kept), dtype=torch.float64, device=device)
        self.means, self.counting = means, False
        self._handles = [p.register_hook(self._hook(i)) for i, p in enumerate(kept)]

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def add(grad: Tensor) -> None:
            if not self.counting:
                return
            g = grad.detach()
            self.sums[-1, index] += torch.linalg.vector_norm(g, dtype=torch.float32).double().square()
            if self.means:
                self.sums[0, index] += g.sum(dtype=torch.float32)

        return add

    def take(self) -> Tensor:
        """The sums since the last call."""
        taken, self.sums = self.sums, torch.zeros_like(self.sums)
        return taken

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
