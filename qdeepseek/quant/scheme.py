"""What a quantised tensor looks like (`QuantScheme`) and how its scale is found (`RangeMethod`).

A scheme is everything that a packer, a kernel or a reference dequantisation must know; it is saved beside the
weights and never guessed from them.  With b bits the codes are integers of

    [qmin, qmax] = [-2^(b-1), 2^(b-1) - 1]      (`narrow` grid: [-(2^(b-1) - 1), 2^(b-1) - 1])

and  codes = clamp(round_half_even(w / s) + z, qmin, qmax),  w_hat = (codes - z) * s.
Symmetric: z = 0 and s = absmax / divisor, divisor = (qmax - qmin) / 2, which is 7.5 on the full 4-bit grid (as in
compressed-tensors) and 7 on the narrow one.  Asymmetric: s = (hi - lo) / (qmax - qmin), z an integer of
[qmin, qmax]; codes stay signed, so one contract serves both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GRANULARITIES = ("per_tensor", "per_channel", "per_group", "per_token")
KINDS = ("minmax", "percentile", "iqr", "mse")


def _require(ok: bool, owner: str, value: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"{owner}: {value!r} is refused; {rule}")


def _from_mapping(cls: type, mapping: Mapping[str, Any]) -> Any:
    known = [field.name for field in fields(cls)]
    unknown = sorted(set(mapping) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__}: unknown keys {unknown}; known keys are {known}")
    return cls(**mapping)


@dataclass(frozen=True)
class QuantScheme:
    """The format of one quantised tensor.

    `group_size` belongs to `per_group` alone; elsewhere it is set to None.
    `scale_dtype` is the dtype in which the scale is served; the forward uses the scale rounded to it.
    `serve_dtype` additionally rounds w_hat, for fp32 training of what a bf16 or fp16 runtime will multiply.
    Raises ValueError for a combination without meaning.
    """

    bits: int = 4
    granularity: str = "per_group"
    group_size: int | None = 32
    symmetric: bool = True
    grid: str = "full"
    scale_dtype: str = "bfloat16"
    serve_dtype: str | None = None

    def __post_init__(self) -> None:
        _require(self.bits in (2, 3, 4, 8), "QuantScheme.bits", self.bits, "use 2, 3, 4 or 8")
        _require(self.granularity in GRANULARITIES, "QuantScheme.granularity", self.granularity,
                 f"use one of {GRANULARITIES}")  # fmt: skip
        if self.granularity == "per_group":
            good = isinstance(self.group_size, int) and self.group_size > 0
            _require(good, "QuantScheme.group_size", self.group_size, "per_group wants a positive integer, say 32")
        else:
            object.__setattr__(self, "group_size", None)
        _require(self.grid in ("full", "narrow"), "QuantScheme.grid", self.grid, "use 'full' or 'narrow'")
        _require(self.symmetric or self.grid == "full", "QuantScheme.grid", self.grid,
                 "an asymmetric scheme has a zero point and uses all codes: set grid 'full'")  # fmt: skip
        _require(self.scale_dtype in DTYPES, "QuantScheme.scale_dtype", self.scale_dtype, f"use one of {[*DTYPES]}")
        _require(self.serve_dtype is None or self.serve_dtype in DTYPES, "QuantScheme.serve_dtype",
                 self.serve_dtype, f"use null or one of {[*DTYPES]}")  # fmt: skip

    @property
    def qmin(self) -> int:
        return -(2 ** (self.bits - 1)) + (1 if self.grid == "narrow" else 0)

    @property
    def qmax(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def divisor(self) -> float:
        """Range (absmax if symmetric, hi - lo otherwise) over scale."""
        return (self.qmax - self.qmin) / 2 if self.symmetric else float(self.qmax - self.qmin)

    @property
    def span(self) -> int:
        """The largest |code - zero|: w_hat never exceeds span * scale."""
        return -self.qmin if self.symmetric else self.qmax - self.qmin

    @property
    def torch_scale_dtype(self) -> torch.dtype:
        return DTYPES[self.scale_dtype]

    @property
    def torch_serve_dtype(self) -> torch.dtype | None:
        return None if self.serve_dtype is None else DTYPES[self.serve_dtype]

    def check_shape(self, shape: Sequence[int], name: str = "tensor") -> None:
        """Raise ValueError with a remedy unless a weight (O, I) or (E, O, I) of this shape fits the scheme."""
        if self.granularity == "per_token":
            raise ValueError(f"{name}: granularity per_token is for activations; use per_channel or per_group")
        if len(shape) not in (2, 3):
            raise ValueError(f"{name}: shape {tuple(shape)} is not (out, in) or (experts, out, in); leave it in bf16")
        if self.group_size is not None and shape[-1] % self.group_size:
            fits = [g for g in (128, 64, 32, 16) if shape[-1] % g == 0 and g < self.group_size]
            use = f"use group_size {' or '.join(map(str, fits))}" if fits else "use per_channel"
            raise ValueError(
                f"in_features {shape[-1]} is not a multiple of group_size {self.group_size} ({name}); {use}, "
                "or keep this module in bf16 with a rule in conf/quant"
            )

    def scale_shape(self, shape: Sequence[int], row_blocks: int = 1) -> tuple[int, ...]:
        """Shape of scale and zero point for a weight (O, I) or (E, O, I), or an activation (..., I).

        per_group (.., O, I/g), per_channel (.., O, 1), per_token (.., 1), per_tensor (.., row_blocks, 1): one
        scale an expert and, with row_blocks = 2, one each for the gate and up halves of a fused gate_up_proj.
        In every case `w.reshape(*scale_shape, -1)` has the elements that share a scale in its last dimension.
        """
        *rows, width = shape
        if self.granularity == "per_group":
            assert self.group_size is not None
            return (*rows, width // self.group_size)
        if self.granularity == "per_tensor":
            return (*rows[:-1], row_blocks, 1)
        return (*rows, 1)

    def bits_per_weight(self, shape: Sequence[int], row_blocks: int = 1) -> float:
        """Stored bits over elements: codes, scales, and zero points of `bits` bits each."""
        scales = math.prod(self.scale_shape(shape, row_blocks))
        extra = torch.finfo(self.torch_scale_dtype).bits + (0 if self.symmetric else self.bits)
        return self.bits + scales * extra / math.prod(shape)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Strict: an unknown key raises ValueError."""
        return _from_mapping(cls, mapping)


@dataclass(frozen=True)
class RangeMethod:
    """How the scale of a weight is found and trained; not part of the served format.

    kind      minmax | percentile | iqr | mse, defined in `qdeepseek.quant.ranges`.
    learned   LSQ: the scale is a parameter that starts at `kind`; otherwise it follows the weight.
    gradient  of the weight: `ste` passes it on unchanged, `clipped` zeroes it where the code was clamped.
    """

    kind: str = "minmax"
    percentile: float = 99.9
    iqr_factor: float = 3.0
    mse_grid: int = 40
    mse_min_ratio: float = 0.5
    mse_norm: float = 2.0
    learned: bool = False
    gradient: str = "ste"

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, "RangeMethod.kind", self.kind, f"use one of {KINDS}")
        _require(50 < self.percentile <= 100, "RangeMethod.percentile", self.percentile, "use a value in (50, 100]")
        _require(self.iqr_factor >= 0, "RangeMethod.iqr_factor", self.iqr_factor, "use a value >= 0, say 3")
        _require(self.mse_grid >= 1, "RangeMethod.mse_grid", self.mse_grid, "use at least 1 point")
        _require(
            0 < self.mse_min_ratio <= 1,
            "RangeMethod.mse_min_ratio",
            self.mse_min_ratio,
            "use a value in (0, 1]",
        )
        _require(self.mse_norm > 0, "RangeMethod.mse_norm", self.mse_norm, "use a value > 0, say 2")
        _require(
            self.gradient in ("ste", "clipped"),
            "RangeMethod.gradient",
            self.gradient,
            "use 'ste' or 'clipped'",
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Strict: an unknown key raises ValueError."""
        return _from_mapping(cls, mapping)
