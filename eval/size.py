"""Bytes of a model folder as they lie on the disk, and bits per weight of what is packed in it.

bits per weight = 8 · (bytes of weight_packed + weight_scale + weight_zero_point + …) / number of weights,
over the tensors a compressed-tensors folder stores packed, so scales and zero points count. Only the
safetensors headers and the two numbers of every `weight_shape` are read.
"""

import json
import math
import struct
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PACKED = "weight_packed"
SIDE_TENSORS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class Size:
    """bytes: of all safetensors files. bits_per_weight: of the packed weights, None where nothing is packed;
    bits_per_parameter: of all parameters; packed_share: of parameters stored packed."""

    bytes: int
    bits_per_weight: float | None
    bits_per_parameter: float
    packed_share: float

    @property
    def parameters(self) -> int:
        return round(8 * self.bytes / self.bits_per_parameter)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file and the offset of its data."""
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def packed_weights(file: Path, name: str, entry: dict[str, Any], data: int) -> int:
    """Number of weights behind a `weight_shape` tensor (int64, two or three numbers)."""
    begin, end = entry["data_offsets"]
    code = "q" if entry["dtype"] == "I64" else "i"
    with file.open("rb") as stream:
        stream.seek(data + begin)
        shape = struct.unpack(f"<{(end - begin) // struct.calcsize(code)}{code}", stream.read(end - begin))
    return math.prod(shape)


def folder_size(folder: Path) -> Size:
    """Measure a checkpoint or an exported folder. Raises FileNotFoundError without safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder}: no *.safetensors file; give a folder written by save_pretrained or an export"
        )
    packed_bytes: dict[str, int] = defaultdict(int)
    weights: dict[str, int] = {}
    plain = 0
    for file in files:
        header, data = read_header(file)
        for name, entry in header.items():
            module, _, leaf = name.rpartition(".")
            begin, end = entry["data_offsets"]
            if leaf in SIDE_TENSORS:
                packed_bytes[module] += end - begin
                if leaf == "weight_shape":
                    weights[module] = packed_weights(file, name, entry, data)
            else:
                plain += (end - begin) // BYTES.get(entry["dtype"], 1)
    total = sum(file.stat().st_size for file in files)
    packed = sum(weights.values())
    bits = 8 * sum(packed_bytes[m] for m in weights) / packed if packed else None
    return Size(total, bits, 8 * total / max(1, packed + plain), packed / max(1, packed + plain))
