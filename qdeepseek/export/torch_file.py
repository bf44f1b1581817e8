"""A file of `torch.save`, read a slice of a tensor at a time, without running what is pickled in it.

    file = zip archive, uncompressed:  NAME/data.pkl        pickle; tensors are (storage key, offset, shape, stride)
                                       NAME/data/KEY        the bytes of a storage

`torch.load(mmap=True)` counts every page that was touched as resident and imports whatever the pickle names
(DeepSpeed, Lightning, the training code). Here tensors come out as `StoredTensor`, which reads by offset; plain
containers and numbers as they are; an object of any other class is left as an `Opaque` in its place.
Format: torch/serialization.py, `_save` and `_load`.
"""

import collections
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: 30 bytes, ending in the lengths of name and extra field
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_PLAIN = {kind.__name__: kind for kind in (set, frozenset, dict, list, tuple, int, float, bool, complex, str, bytes)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: dtype, shape, and where its first byte is."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Elements begin … end (default all) in row-major order, flat, in memory of their own."""
        if not self._contiguous():
            raise ValueError(f"{self.path} holds a tensor {self.shape} with strides {self.stride}; save it contiguous")
        count = (self.numel if end is None else end) - begin
        flat = torch.empty(count, dtype=self.dtype)
        if count:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start + begin * self.dtype.itemsize)
                view = flat.view(torch.uint8).numpy().data
                while view:
                    read = file.readinto(view)
                    if not read:
                        raise ValueError(f"{self.path} ended inside a tensor; it was written only in part")
                    view = view[read:]
        return flat

    def _contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


class Opaque:
    """Stands for a pickled object of a class that this reader does not know."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass


def load(path: Path) -> Any:
    """What was saved, tensors as StoredTensor. Raises ValueError for a file that is no complete torch archive."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            entries = {info.filename: info for info in archive.infolist()}
            pickled = next(name for name in entries if name.endswith("/data.pkl"))
            root = pickled.removesuffix("data.pkl")
            if root + "byteorder" in entries and archive.read(root + "byteorder") != b"little":
                raise ValueError(f"{path} was written on a big-endian machine; load and save it on a little-endian one")

            def position(key: str) -> int:
                info = entries[f"{root}data/{key}"]
                if info.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{path} is compressed; tensors are read in place, so unpack and save it again")
                file.seek(info.header_offset)
                return info.header_offset + 30 + sum(_LOCAL_HEADER.unpack(file.read(30)))

            with archive.open(pickled) as stream:
                return _Unpickler(stream, path, position).load()
    except (zipfile.BadZipFile, StopIteration, EOFError, KeyError, struct.error, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is no complete file of torch.save ({type(error).__name__}: {error}); it was written only in part?"
        ) from error


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype | None  # None: untyped, or unknown
    start: int


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, path: Path, position: Callable[[str], int]):
        super().__init__(stream, encoding="utf-8")
        self._path, self._position = path, position

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name.startswith("_rebuild_tensor"):
            return self._rebuild_untyped if name == "_rebuild_tensor_v3" else self._rebuild
        if module == "torch._utils" and name.startswith("_rebuild_parameter"):
            return lambda data, *rest: data
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return lambda rebuild, kind, arguments, state: rebuild(*arguments)
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module in ("builtins", "__builtin__") and name in _PLAIN:
            return _PLAIN[name]
        return Opaque

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, _ = pid
        return _Storage(kind if isinstance(kind, torch.dtype) else None, self._position(key))

    def _rebuild(self, storage: _Storage, offset: int, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
        if storage.dtype is None:
            raise ValueError(f"{self._path} holds a tensor of a dtype that this reader does not know")
        return self._tensor(storage, offset, shape, stride, storage.dtype)

    def _rebuild_untyped(
        self, storage: _Storage, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
    ) -> StoredTensor:
        return self._tensor(storage, offset, shape, stride, dtype)

    def _tensor(self, storage: _Storage, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> StoredTensor:
        return StoredTensor(self._path, dtype, tuple(shape), tuple(stride), storage.start + offset * dtype.itemsize)
