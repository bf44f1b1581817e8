"""Which rows of a gradient belong together: all of a tensor, or those of one expert among tokens sorted or not.

A gradient is g (.., C): rows are tokens, C channels. It falls into groups, and every rule of this package is written
with four sums over a group's rows, so that a dense layer and each of E fused experts see the same arithmetic:

    Whole       g (B, L, C) or (L, C): one group; the token mean is over dim -2, kept, one a sequence
    PerExpert   g (S, C), expert e_S of every row: E groups; the token mean of expert e is over the rows it got

No sync with the host and no branch on a value. `index_add_` adds in an order that CUDA leaves open, unless
`torch.use_deterministic_algorithms` is on; on the CPU a repeated call is bit-identical.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Compensated(NamedTuple):
    """What a rule returns; M is the number of groups.

    grad       like the gradient given
    fired      (M,) in [0, 1]: whether the condition held, or the share of rows for which it did
    factor     (M,) mean factor applied, 1 where the condition did not hold
    observed   (M, k) statistics of this gradient for `history.update_`; k = 0 for a rule without memory
    """

    grad: Tensor
    fired: Tensor
    factor: Tensor
    observed: Tensor


class Tokens(Protocol):
    """A partition of rows into M groups."""

    def rows(self, g: Tensor) -> Tensor:
        """(M,): number of rows of each group."""
        ...

    def sum(self, per_row: Tensor) -> Tensor:
        """(M,): sum over the rows of each group of a quantity per row (..)."""
        ...

    def spread(self, per_group: Tensor) -> Tensor:
        """A quantity per group (M,) as one that broadcasts against rows with their channels (.., C)."""
        ...

    def mean(self, g: Tensor) -> Tensor:
        """Token mean: (B, 1, C), (1, C) or (E, C)."""
        ...

    def along(self, mean: Tensor) -> Tensor:
        """What `mean` returned, or a function of it, as a tensor that broadcasts against g."""
        ...

    def average(self, mean: Tensor) -> Tensor:
        """(M,): average over everything of a group of what `mean` returned."""
        ...


@dataclass(frozen=True)
class Whole:
    """All rows are one group."""

    def rows(self, g: Tensor) -> Tensor:
        return torch.full((1,), g.shape[:-1].numel(), device=g.device, dtype=g.dtype)

    def sum(self, per_row: Tensor) -> Tensor:
        return per_row.sum().view(1)

    def spread(self, per_group: Tensor) -> Tensor:
        return per_group

    def mean(self, g: Tensor) -> Tensor:
        return g.mean(-2, keepdim=True)

    def along(self, mean: Tensor) -> Tensor:
        return mean

    def average(self, mean: Tensor) -> Tensor:
        return mean.mean().view(1)


@dataclass(frozen=True)
class PerExpert:
    """Row s belongs to expert `expert_S[s]`; rows of an id >= `experts` (expert parallelism) belong to no group.

    Such rows hold uninitialised memory in a grouped matmul's backward; they reach no sum, and whatever a rule makes
    of them is masked by transformers before it reaches a weight or a token.
    """

    expert_S: Tensor
    experts: int

    def _add(self, values: Tensor) -> Tensor:
        """(S, ..) -> (E, ..)."""
        total = values.new_zeros(self.experts + 1, *values.shape[1:])
        return total.index_add_(0, self.expert_S.clamp(max=self.experts), values)[: self.experts]

    def _rows_of(self, per_expert: Tensor) -> Tensor:
        """(E, ..) -> (S, ..), the last expert's value where a row belongs to none."""
        return per_expert[self.expert_S.clamp(max=self.experts - 1)]

    def rows(self, g: Tensor) -> Tensor:
        return self._add(torch.ones_like(self.expert_S, dtype=g.dtype))

    def sum(self, per_row: Tensor) -> Tensor:
        return self._add(per_row)

    def spread(self, per_group: Tensor) -> Tensor:
        return self._rows_of(per_group).unsqueeze(-1)

    def mean(self, g: Tensor) -> Tensor:
        return self._add(g) / self.rows(g).clamp_min(1).unsqueeze(-1)

    def along(self, mean: Tensor) -> Tensor:
        return self._rows_of(mean)

    def average(self, mean: Tensor) -> Tensor:
        return mean.mean(-1)


def energy(g: Tensor, tokens: Tokens) -> Tensor:
    """(M,): sum of squares of each group."""
    return tokens.sum(g.square().sum(-1))


def variance(g: Tensor, tokens: Tokens) -> Tensor:
    """(M,): variance over all elements of each group (divided by their number, not by one less); 0 if empty."""
    size = tokens.rows(g).clamp_min(1) * g.shape[-1]
    mean = tokens.sum(g.sum(-1)) / size
    return energy(g - tokens.spread(mean), tokens) / size
