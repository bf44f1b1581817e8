"""What a recipe does to a model, by parameter count: a table for people, a mapping for files.

    share(part, class, scheme) = parameters in that row / all parameters
    bits per weight = sum(bits_per_weight(scheme, shape) * n) / sum(n), kept parameters counted as 16 bits

A weight shared by two modules counts once, and twice when the recipe unties it. Buffers are not counted.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from qdeepseek.surgery.recipe import TensorScheme

KEPT = "kept"
KEPT_BITS = 16


class CoverageError(ValueError):
    """A recipe that does not fit the model: module, value, rule and remedy are in the message."""


@dataclass(frozen=True)
class PlannedTensor:
    """One parameter of the model and what becomes of it (`scheme` None: it stays as it is)."""

    name: str
    shape: tuple[int, ...]
    numel: int
    part: str
    module_class: str
    scheme: TensorScheme | None

    @property
    def label(self) -> str:
        return KEPT if self.scheme is None else self.scheme.label_of(self.name)

    @property
    def bits(self) -> float:
        """Stored bits of the whole tensor, scales and zero points included."""
        bits = KEPT_BITS if self.scheme is None else self.scheme.weight.bits_per_weight(self.shape)
        return bits * self.numel


@dataclass(frozen=True)
class CoverageRow:
    part: str
    module_class: str
    scheme: str
    tensors: int
    parameters: int
    share: float


@dataclass(frozen=True)
class Coverage:
    """The plan of a recipe on a model.

    planned    every parameter in model order
    unmatched  names of Linear and Embedding modules that no rule mentions (they stay as they are)
    """

    recipe: str
    planned: tuple[PlannedTensor, ...]
    unmatched: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, TensorScheme | None]:
        """Parameter name -> scheme, None where the parameter stays as it is."""
        return {tensor.name: tensor.scheme for tensor in self.planned}

    @property
    def parameters(self) -> int:
        return sum(tensor.numel for tensor in self.planned)

    @property
    def quantized_share(self) -> float:
        """Quantised parameters over all parameters."""
        return _share((t.numel for t in self.planned if t.scheme), self.parameters)

    @property
    def expert_share(self) -> float | None:
        """Quantised over all routed-expert parameters; None for a model without routed experts."""
        experts = [t for t in self.planned if t.part == "routed_experts" and len(t.shape) > 1]
        total = sum(t.numel for t in experts)
        return _share((t.numel for t in experts if t.scheme), total) if total else None

    @property
    def bits_per_weight(self) -> float:
        """Mean stored bits of a parameter, scales included, kept parameters at 16."""
        return sum(tensor.bits for tensor in self.planned) / max(self.parameters, 1)

    @property
    def rows(self) -> tuple[CoverageRow, ...]:
        """One row for each (part, module class, scheme), largest first."""
        counts: dict[tuple[str, str, str], list[int]] = {}
        for tensor in self.planned:
            key = (tensor.part, tensor.module_class, tensor.label)
            count = counts.setdefault(key, [0, 0])
            count[0] += 1
            count[1] += tensor.numel
        total = max(self.parameters, 1)
        rows = [CoverageRow(*key, n, numel, numel / total) for key, (n, numel) in counts.items()]
        return tuple(sorted(rows, key=lambda row: -row.parameters))

    def table(self) -> str:
        """The rows as text, with one line of totals above and the modules that no rule mentions below."""
        head = ("part", "module class", "scheme", "tensors", "parameters", "share")
        lines = [head] + [
            (r.part, r.module_class, r.scheme, f"{r.tensors:,}", f"{r.parameters:,}", f"{r.share:7.2%}")
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = [
            "  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
            for line in lines
        ]
        experts = "no routed experts" if self.expert_share is None else f"routed experts {self.expert_share:.2%}"
        text.insert(
            0,
            f"recipe {self.recipe}: {self.quantized_share:.2%} of {self.parameters:,} parameters quantised, {experts}, "
            f"{self.bits_per_weight:.2f} bits per weight (kept ones as {KEPT_BITS})",
        )
        if self.unmatched:
            more = f" and {len(self.unmatched) - 4} more" if len(self.unmatched) > 4 else ""
            text.append(f"no rule mentions {', '.join(self.unmatched[:4])}{more}: kept")
        return "\n".join(text)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: totals, rows, and the scheme label of every parameter."""
        return {
            "recipe": self.recipe,
            "parameters": self.parameters,
            "quantized_share": self.quantized_share,
            "expert_share": self.expert_share,
            "bits_per_weight": self.bits_per_weight,
            "rows": [asdict(row) for row in self.rows],
            "tensors": {t.name: t.label for t in self.planned},
            "unmatched": list(self.unmatched),
        }

    def __str__(self) -> str:
        return self.table()


def _share(numels: Iterable[int], total: int) -> float:
    return sum(numels) / total if total else 0.0
