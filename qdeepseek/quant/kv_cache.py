"""What a served KV cache holds: the format of one cached vector, and which formats a model's cache has.

A cached vector is one token's key or value of one head, or in MLA one token's latent (kv_a_layernorm's output, shared
by all heads) and its rope key (after rotation, shared too). Scales never mix tokens or heads: a cache is written one
token at a time.

    int8, int4   codes ±127, ±7: s = absmax / 127 or / 7 (asymmetric: (hi − lo) / 255 or / 15 with a zero point)
    fp8          E4M3, s = absmax / 448, or s = 1 with `static` (fp8.py)

with one s for the vector, or for each `group_size` of it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from torch import Tensor

from qdeepseek.quant.fake_quantize import fake_quantize_activation
from qdeepseek.quant.fp8 import fake_quantize_e4m3
from qdeepseek.quant.scheme import DTYPES, QuantScheme

BITS = {"int8": 8, "fp8": 8, "int4": 4}


@dataclass(frozen=True)
class CacheFormat:
    """Format of one cached vector.

    dtype        int8 | fp8 | int4
    group_size   None: one scale a token and head; else elements that share a scale
    symmetric    integers only: False adds a zero point
    static       fp8 only: the scale is 1 and is not stored
    scale_dtype  dtype in which scales are stored beside the codes

    Raises ValueError for a combination without meaning.
    """

    dtype: str = "int8"
    group_size: int | None = None
    symmetric: bool = True
    static: bool = False
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise ValueError(f"CacheFormat.dtype: {self.dtype!r} is refused; use one of {[*BITS]}, null for 16 bits")
        if self.group_size is not None and (not isinstance(self.group_size, int) or self.group_size < 1):
            raise ValueError(f"CacheFormat.group_size: {self.group_size!r} is refused; use null or a positive integer")
        if self.dtype == "fp8" and not self.symmetric:
            raise ValueError("CacheFormat.symmetric: False is refused; fp8 has no zero point, set it to true")
        if self.static and (self.dtype != "fp8" or self.group_size is not None):
            raise ValueError("CacheFormat.static: True is refused; a scale of 1 is for fp8 without group_size")
        if self.scale_dtype not in DTYPES:
            raise ValueError(f"CacheFormat.scale_dtype: {self.scale_dtype!r} is refused; use one of {[*DTYPES]}")

    @property
    def integer(self) -> QuantScheme:
        """The scheme of an int8 or int4 cache."""
        return QuantScheme(
            BITS[self.dtype], "per_token" if self.group_size is None else "per_group", self.group_size, self.symmetric,
            "narrow" if self.symmetric else "full", self.scale_dtype,
        )  # fmt: skip

    def check_width(self, width: int, name: str) -> None:
        """Raise ValueError with a remedy unless groups divide a vector of `width` elements."""
        if self.group_size is not None and width % self.group_size:
            fits = [g for g in (128, 64, 32, 16) if width % g == 0 and g < self.group_size]
            use = " or ".join(map(str, fits)) or "null"
            raise ValueError(
                f"{name} has {width} elements, not a multiple of group_size {self.group_size}; use group_size {use} "
                "in method.kv_cache"
            )

    def bits_per_value(self, width: int) -> float:
        """Stored bits over elements of a vector of `width`: codes, scales, zero points."""
        bits = BITS[self.dtype]
        if self.static:
            return bits
        scale = DTYPES[self.scale_dtype].itemsize * 8 + (0 if self.symmetric else bits)
        return bits + scale / (self.group_size or width)

    @property
    def label(self) -> str:
        """Short name, such as `INT8 per token and head`."""
        where = "static" if self.static else f"g{self.group_size}" if self.group_size else "per token and head"
        return f"{self.dtype.upper()} {where}" + ("" if self.symmetric else " asym")


@dataclass(frozen=True)
class KVCacheScheme:
    """Formats of a model's cache.

    cache  of keys and values; of the latent in MLA
    rope   of MLA's rope key, None for 16 bits. Says nothing about other models, whose keys hold their rope part
    """

    cache: CacheFormat
    rope: CacheFormat | None = None

    @property
    def label(self) -> str:
        return self.cache.label + (f", rope {self.rope.label}" if self.rope else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Strict: an unknown key raises ValueError naming the known ones."""
        values = _known(mapping, cls)
        if values.get("cache") is None:
            raise ValueError("KVCacheScheme: key cache is missing; give at least cache: {dtype: int8}")
        rope = values.get("rope")
        return cls(
            CacheFormat(**_known(values["cache"], CacheFormat)),
            None if rope is None else CacheFormat(**_known(rope, CacheFormat)),
        )


def fake_quantize_cache(x: Tensor, form: CacheFormat) -> Tensor:
    """x_hat, like x (.., D), as it is read back from a cache of this format; straight-through gradient."""
    if form.dtype == "fp8":
        return fake_quantize_e4m3(x, form.group_size, DTYPES[form.scale_dtype], form.static)
    return fake_quantize_activation(x, form.integer)


def _known(mapping: Any, cls: type) -> dict[str, Any]:
    known = [field.name for field in fields(cls)]
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{cls.__name__}: {mapping!r} is refused; give a mapping with keys of {known}")
    unknown = sorted(set(mapping) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__}: unknown keys {unknown}; known keys are {known}")
    return dict(mapping)
