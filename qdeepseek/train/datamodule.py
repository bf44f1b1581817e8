"""Datasets as Lightning loaders whose position is in the checkpoint.

Training batches come from an endless order that is a pure function of (seed, batch number), see data/order.py;
the state is the number of batches each rank has consumed, so a resumed run reads the very next batch. Batch n of all
ranks together is the same sequences for every number of ranks whose product with the batch size is the same; a run
that is resumed with another product is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from qdeepseek.data.order import ResumableBatches
from qdeepseek.train.config import ConfigError
from qdeepseek.train.stop import deaf

Collate = Callable[[Sequence[dict[str, Tensor]]], dict[str, Tensor]]


class TokenDataModule(L.LightningDataModule):
    """Train and select parts of tokenised data.

    Args:
        train, select: map-style datasets of token dicts.
        batch_size: sequences of one micro-batch on one rank.
        collate: builds a batch dict.
        seed: of the training order.
        workers: loader processes; 0 keeps everything in the main process.
        start: number of the first batch of the order.
        data_hash: of the data, compared when a run is continued.
    """

    def __init__(
        self,
        train: Dataset[dict[str, Tensor]],
        select: Dataset[dict[str, Tensor]],
        batch_size: int,
        collate: Collate,
        seed: int = 0,
        workers: int = 0,
        start: int = 0,
        data_hash: str = "",
    ):
        super().__init__()
        self.train, self.select = train, select
        self.batch_size, self.collate, self.seed, self.workers = batch_size, collate, seed, workers
        self.start = self._first = start
        self.data_hash = data_hash

    def _shape(self) -> dict[str, Any]:
        world = self.trainer.world_size if self.trainer is not None else 1
        return {
            "world": world, "batch_size": self.batch_size, "seed": self.seed, "items": len(self.train),  # type: ignore[arg-type]
            "data_hash": self.data_hash,
        }  # fmt: skip

    def _order(self, start: int = 0) -> ResumableBatches:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return ResumableBatches(len(self.train), self.batch_size, self.seed, rank, world, start)  # type: ignore[arg-type]

    def batch(self, number: int) -> dict[str, Tensor]:
        """This rank's training batch `number` of the order once more, on the host."""
        return self.collate([self.train[item] for item in self._order().batch(number)])

    @property
    def consumed(self) -> int:
        """Batches of the order that this rank has begun or finished; the current one is `batch(consumed - 1)`."""
        assert self.trainer is not None
        return self._first + self.trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            self.train, batch_sampler=self._order(self.start), collate_fn=self.collate, num_workers=self.workers,
            persistent_workers=self.workers > 0, worker_init_fn=deaf,
        )  # fmt: skip

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        sampler: DistributedSampler[dict[str, Tensor]] | None = None
        if self.trainer is not None and self.trainer.world_size > 1:
            sampler = DistributedSampler(self.select, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(self.select, self.batch_size, collate_fn=self.collate, sampler=sampler)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.consumed, "first": self._first, **self._shape()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = self._shape()
        changed = [k for k in now if now[k] != state[k]]
        if now["world"] * now["batch_size"] == state["world"] * state["batch_size"]:
            changed = [k for k in changed if k not in ("world", "batch_size")]
        if changed:
            was = ", ".join(f"{k} {state[k]} -> {now[k]}" for k in changed)
            raise ConfigError(
                f"data: the checkpoint was written with another data order ({was}); resume with the same product of "
                f"ranks and data.batch_size, the same seed and data, or start a new run from its weights"
            )
        self.start, self._first = state["batches"], state["first"]
