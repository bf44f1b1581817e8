"""The safetensors format, read and written one tensor at a time through ordinary file calls.

    file = uint64 length of header | header (JSON, padded with spaces to 8 bytes) | data, tensor after tensor
    header = {name: {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}, "__metadata__": {...}}

The library's reader maps a whole shard into memory, so every page it has touched counts as resident; its
writer hides errors of the disk and cannot hash what it writes. Here a process holds the tensor it works on,
sees ENOSPC as the OSError it is, and gets the SHA-256 of the file in the same pass. Format: safetensors 0.3
and later.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Header entry: dtype, shape and the absolute position of the data in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Header of a safetensors file; raises ValueError with the reason if the file is broken or cut short."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"a header of {length} bytes does not fit a file of {size} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        infos = {name: _info(entry, 8 + length) for name, entry in header.items()}
        end = max((info.start + info.nbytes for info in infos.values()), default=8 + length)
        if end != size:
            raise ValueError(f"its header describes {end} bytes, the file has {size}")
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no complete safetensors file: {error}; download or copy it again") from error
    return infos


def read_metadata(path: Path) -> dict[str, str]:
    """The `__metadata__` of a safetensors file, empty if it has none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)).get("__metadata__", {})


def read_tensor(path: Path, info: TensorInfo) -> Tensor:
    """Reads one tensor into memory of its own."""
    tensor = torch.empty(info.shape, dtype=info.dtype)
    if info.nbytes:
        with path.open("rb", buffering=0) as file:
            file.seek(info.start)
            view = _as_bytes(tensor).numpy().data
            while view:
                count = file.readinto(view)
                if not count:
                    raise ValueError(f"{path} ended inside a tensor; download or copy it again")
                view = view[count:]
    return tensor


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Writes the tensors, flushes them to the disk and returns the file's SHA-256 in hex."""
    header, position = {}, 0
    for name, tensor in tensors.items():
        header[name] = _entry(tensor, position)
        position += tensor.nbytes
    return _write(path, header, (_view(tensor) for tensor in tensors.values()), metadata)


class Buffer:
    """Collects tensors for one file as a stream of bytes in pages of its own.

    Many small tensors that live on between large temporaries would tear the heap apart (measured: four times their
    size); here only their bytes are kept, and the memory goes back to the system when the buffer does.
    """

    CHUNK = 64 << 20

    def __init__(self) -> None:
        self.nbytes = 0
        self._header: dict[str, dict] = {}
        self._chunks: list[mmap.mmap] = []

    @property
    def names(self) -> list[str]:
        return list(self._header)

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies the tensor's bytes to the end."""
        self._header[name] = _entry(tensor, self.nbytes)
        data = _view(tensor)
        while data:
            room = len(self._chunks) * self.CHUNK - self.nbytes
            if not room:
                self._chunks.append(mmap.mmap(-1, self.CHUNK))
                room = self.CHUNK
            part, data = data[:room], data[room:]
            self._chunks[-1].write(part)
            self.nbytes += len(part)

    def write(self, path: Path, metadata: Mapping[str, str] | None = None) -> str:
        """Like the function `write`, of what was collected."""
        views = [memoryview(chunk) for chunk in self._chunks]
        if views:
            views[-1] = views[-1][: self.nbytes - (len(views) - 1) * self.CHUNK]
        return _write(path, self._header, views, metadata)


def _write(path: Path, header: dict[str, dict], data: Iterable[memoryview], metadata: Mapping[str, str] | None) -> str:
    content = ({"__metadata__": dict(metadata)} if metadata else {}) | header
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        chunks: Iterable[bytes | memoryview] = chain((len(text).to_bytes(8, "little"), text), data)
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _entry(tensor: Tensor, position: int) -> dict:
    return {
        "dtype": DTYPE_NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "data_offsets": [position, position + tensor.nbytes],
    }


def _view(tensor: Tensor) -> memoryview:
    return _as_bytes(tensor.detach().cpu().contiguous()).numpy().data


def _info(entry: dict, data_start: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is not known to this reader")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if torch.Size(shape).numel() * dtype.itemsize != end - begin:
        raise ValueError(f"shape {shape} of {entry['dtype']} does not fill the {end - begin} bytes it is given")
    return TensorInfo(dtype, shape, data_start + begin, end - begin)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
