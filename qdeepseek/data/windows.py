"""Raw text as fixed-length windows: documents joined by BOS and EOS, cut every `stride` tokens.

Training uses overlapping windows (stride < length) so that every position is seen with many contexts;
evaluation uses stride == length, so that every token is scored once. Attention is plain causal over a window,
as in pretraining. Batches are dicts of int64: input_ids, labels (same ids; the model shifts), position_ids.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Windows of `length` tokens over one long token sequence; item i starts at i · stride."""

    def __init__(self, tokens: Tensor, length: int, stride: int | None = None):
        self.tokens, self.length, self.stride = tokens, length, stride or length
        if len(tokens) < length:
            raise ValueError(
                f"the data has {len(tokens)} tokens, fewer than one window of {length}; "
                f"give more text or a smaller data.length"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - self.length) // self.stride + 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.stride
        ids = self.tokens[start : start + self.length].long()
        return {"input_ids": ids, "labels": ids}


def join_documents(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], bos: int | None, eos: int | None
) -> Tensor:
    """Token ids of all texts as one int32 vector, each text framed by `bos` and `eos` where they exist."""
    pieces = []
    for text in texts:
        ids = list(encode(text))
        pieces.append(([bos] if bos is not None else []) + ids + ([eos] if eos is not None else []))
    if not pieces:
        raise ValueError("the data has no documents; check data.path and data.fractions")
    return torch.cat([torch.tensor(p, dtype=torch.int32) for p in pieces])


def collate_windows(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack windows: input_ids (B, L), labels (B, L)."""
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}
