"""Documents packed into sequences of one length, each document seeing itself only.

Best-fit decreasing: the longest documents first, each into the fullest sequence it still fits, at most
11/9 · optimum + 1 sequences. In a sequence (L tokens) document d occupies [s_d, s_d + n_d):

    position_ids[t] = t − s_d          mask[q, k] = (document[q] == document[k]) and k ≤ q
    labels[s_d] = −100                 (the model shifts labels itself: nothing predicts a first token)

Padding is a document of its own, so that no row of the mask is empty (softmax over nothing is NaN), without
loss. Logits and loss of a document then equal those of the document alone (Krell et al. 2021, arXiv
2107.02027).
Shapes: B sequences, L tokens.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qdeepseek.data.chat import IGNORE, Encoded
from qdeepseek.data.sources import DataError

TOO_LONG = ("error", "truncate", "split")
PADDING = -1  # document id of padding


@dataclass(frozen=True)
class PackingStats:
    """What became of the documents: counts, and the share of positions that hold a token."""

    documents: int
    truncated: int
    split: int
    dropped: int
    tokens: int
    trained_tokens: int
    sequences: int
    fill: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def fit_length(documents: Sequence[Encoded], length: int, too_long: str) -> tuple[list[Encoded], dict[str, int]]:
    """Documents of at most `length` tokens that have something to train on, and counts of what was changed.

    `too_long`: "error" raises DataError with the row, "truncate" keeps the first `length` tokens, "split"
    makes pieces that overlap by one token, so that every token is still predicted once. A document whose
    labels are all lost by that (or that has a single token) is dropped and counted.
    """
    if too_long not in TOO_LONG:
        raise DataError(f"data.too_long={too_long!r}: choose one of {', '.join(TOO_LONG)}")
    fitting, counts = [], {"truncated": 0, "split": 0, "dropped": 0}
    for document in documents:
        pieces = [document]
        if len(document.input_ids) > length:
            if too_long == "error":
                raise DataError(
                    f"{document.where}: {len(document.input_ids)} tokens are more than "
                    f"data.max_length={length}; shorten the row, raise "
                    f"data.max_length (up to what the model allows), or set data.too_long=truncate or split"
                )
            counts["truncated" if too_long == "truncate" else "split"] += 1
            pieces = [_slice(document, s, length) for s in range(0, len(document.input_ids) - 1, length - 1)]
            pieces = pieces[:1] if too_long == "truncate" else pieces
        kept = [p for p in pieces if (p.labels[1:] != IGNORE).any()]
        counts["dropped"] += not kept
        fitting += kept
    return fitting, counts


def _slice(document: Encoded, start: int, length: int) -> Encoded:
    end = start + length
    return Encoded(document.where, document.input_ids[start:end], document.labels[start:end])


def check_length(length: int, max_positions: int | None) -> None:
    """Raises DataError when sequences of `length` are impossible or longer than the model allows."""
    if length < 2:
        raise DataError(f"data.max_length={length}: at least 2 tokens are needed to predict one from another")
    if max_positions is not None and length > max_positions:
        raise DataError(
            f"data.max_length={length} is more than the model's max_position_embeddings {max_positions}; "
            f"set data.max_length={max_positions} or less"
        )


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: bins of indices into `lengths`, the sum in each at most `capacity`."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted; full bins are left out
    for index in order:
        size = lengths[index]
        if size > capacity:
            raise DataError(f"document {index} has {size} tokens, more than the sequence length {capacity}")
        at = bisect.bisect_left(room, (size, -1))
        if at == len(room):
            free, target = capacity, len(bins)
            bins.append([])
        else:
            free, target = room.pop(at)
        bins[target].append(index)
        if free > size:
            bisect.insort(room, (free - size, target))
    return [sorted(b) for b in bins]


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Packed sequences; an item is int64 input_ids, labels, position_ids, document_ids, all (L,).

    Args:
        documents: encoded rows.
        length: tokens of a sequence.
        pad_token_id: fills the rest of a sequence (without loss).
        too_long: see `fit_length`.
    """

    def __init__(self, documents: Sequence[Encoded], length: int, pad_token_id: int, too_long: str = "error"):
        self.documents, counts = fit_length(documents, length, too_long)
        if not self.documents:
            raise DataError(
                f"no document with a token to train on is left of {len(documents)} at data.max_length="
                f"{length} with data.too_long={too_long}; raise data.max_length"
            )
        sizes = [len(d.input_ids) for d in self.documents]
        self.length, self.pad_token_id = length, pad_token_id
        self.bins = pack(sizes, length)
        self.stats = PackingStats(
            documents=len(self.documents), tokens=sum(sizes), sequences=len(self.bins),
            trained_tokens=sum(int((d.labels[1:] != IGNORE).sum()) for d in self.documents),
            fill=sum(sizes) / (len(self.bins) * length), **counts,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = np.full(self.length, self.pad_token_id, dtype=np.int64)
        labels = np.full(self.length, IGNORE, dtype=np.int64)
        positions = np.zeros(self.length, dtype=np.int64)
        owner = np.full(self.length, PADDING, dtype=np.int64)
        start = 0
        for number, member in enumerate(self.bins[index]):
            document = self.documents[member]
            end = start + len(document.input_ids)
            ids[start:end] = document.input_ids
            labels[start + 1 : end] = document.labels[1:]
            positions[start:end] = np.arange(end - start)
            owner[start:end] = number
            start = end
        positions[start:] = np.arange(self.length - start)
        item = {"input_ids": ids, "labels": labels, "position_ids": positions, "document_ids": owner}
        return {key: torch.from_numpy(value) for key, value in item.items()}


def block_causal_mask(document_ids: Tensor) -> Tensor:
    """Bool (B, 1, L, L), True where query q may attend to key k: same document and k ≤ q."""
    length = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal)[:, None]


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is True, the lowest finite number of `dtype` elsewhere.

    transformers' `eager` attention adds the mask to the scores, so a bool mask there shifts scores by 0 or 1
    and lets every document see every other without an error. `sdpa` takes the bool mask as it is.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def collate_packed(items: Sequence[dict[str, Tensor]], with_mask: bool = True) -> dict[str, Tensor]:
    """A batch: input_ids, labels, position_ids (B, L) int64 and attention_mask (B, 1, L, L) bool.

    `with_mask=False` leaves the mask out for kernels that find documents by position_ids (flash attention);
    the model must then run with use_cache=False, or transformers does not look at the positions.
    """
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    owner = batch.pop("document_ids")
    return {**batch, "attention_mask": block_causal_mask(owner)} if with_mask else batch


def real_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Bool (B, L), False for padding, from a batch on any device without a sync.

    A 2-D attention_mask says it. In packed rows padding is the last document (positions restart at 0 with each)
    when it trains nothing: `fit_length` drops a document without a trained label. A row without either has none.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and mask.ndim == 2:
        return mask.bool()
    if positions is None:
        return torch.ones_like(batch["input_ids"], dtype=torch.bool)
    at = torch.arange(positions.shape[1], device=positions.device)
    last = at >= torch.where(positions == 0, at, 0).amax(1, keepdim=True)
    trained = (last & (batch["labels"] != IGNORE)).any(1, keepdim=True)
    return ~last | trained
