"""The order of training batches as a pure function of (seed, batch number): resuming needs one integer.

Epoch e visits all items in the permutation drawn from seed + e; batch n of rank r out of R takes the items
[(n·R + r)·B, (n·R + r + 1)·B) of the endless concatenation of epochs. Batches may straddle epochs; no item is
dropped or seen twice before all have been seen once.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class ResumableBatches(Sampler[list[int]]):
    """Endless batch sampler; `start` is the number of batches this rank has already consumed."""

    def __init__(self, items: int, batch_size: int, seed: int, rank: int = 0, world: int = 1, start: int = 0):
        if items < 1:
            raise ValueError("the training part of the data is empty; check data.path and data.fractions")
        self.items, self.batch_size, self.seed = items, batch_size, seed
        self.rank, self.world, self.start = rank, world, start
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def _item(self, position: int) -> int:
        epoch, offset = divmod(position, self.items)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.items, generator=generator)
        return int(self._order[offset])

    def batch(self, number: int) -> list[int]:
        """Items of this rank's batch `number`."""
        first = (number * self.world + self.rank) * self.batch_size
        return [self._item(first + i) for i in range(self.batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        number = self.start
        while True:
            yield self.batch(number)
            number += 1
