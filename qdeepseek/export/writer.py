"""An export folder appears whole or not at all.

`atomic_folder` hands out a temporary sibling of the destination. When its body ends well the folder is
flushed and takes the destination's name; an earlier export is exchanged for it in one system call (Linux
renameat2 with RENAME_EXCHANGE), so at no instant is the name missing or half filled, not even at SIGKILL.
When the body fails (full disk, Ctrl-C, a bug) the temporary folder is removed and the earlier export is what
it was. What a killed process left behind is removed by the next export to the same place.

`ShardWriter` collects tensors up to the shard size and writes them as `model-0000i-of-0000n.safetensors` with
`model.safetensors.index.json`, or as one `model.safetensors`. It holds one shard at most.
"""

import ctypes
import errno
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qdeepseek.export import safetensors_file

MANIFEST = "qdeepseek_manifest.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FULL = {errno.ENOSPC: "no space left on the device", errno.EDQUOT: "the disk quota is used up",
         errno.EFBIG: "the file size limit is reached"}  # fmt: skip


@dataclass(frozen=True)
class WrittenFile:
    """A file of an export, as the manifest lists it."""

    sha256: str
    bytes: int


class ShardWriter:
    """Writes tensors in the order they come, a shard at a time, into an existing folder."""

    def __init__(self, folder: Path, max_shard_bytes: int = 5_000_000_000):
        if max_shard_bytes <= 0:
            raise ValueError(f"max_shard_bytes {max_shard_bytes} must be positive, such as 5_000_000_000")
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self.total_bytes = 0
        self._pending = safetensors_file.Buffer()
        self._shards: list[tuple[list[str], str]] = []  # (tensor names, sha256)
        self._names: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a copy of the tensor; it is on disk when its shard is full."""
        if name in self._names:
            raise ValueError(f"tensor {name} is written twice; two modules map to one checkpoint name")
        if self._pending.nbytes and self._pending.nbytes + tensor.nbytes > self.max_shard_bytes:
            self._flush()
        self._names.add(name)
        self._pending.add(name, tensor)
        self.total_bytes += tensor.nbytes

    def finish(self) -> dict[str, WrittenFile]:
        """Writes the last shard and the index, gives the shards their names, returns what was written."""
        if self._pending.names or not self._shards:
            self._flush()
        count = len(self._shards)
        files, weight_map = {}, {}
        for number, (names, digest) in enumerate(self._shards, 1):
            file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            path = self._part(number).rename(self.folder / file)
            files[file] = WrittenFile(digest, path.stat().st_size)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return files

    def _flush(self) -> None:
        path = self._part(len(self._shards) + 1)
        digest = self._pending.write(path, {"format": "pt"})
        self._shards.append((self._pending.names, digest))
        self._pending = safetensors_file.Buffer()

    def _part(self, number: int) -> Path:
        return self.folder / f"shard-{number:05}.part"


@contextmanager
def atomic_folder(destination: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `destination` on success and is removed on any failure.

    Raises FileExistsError if the destination is something else than an earlier export or an empty folder.
    """
    destination = Path(os.path.abspath(destination))
    _check_replaceable(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(destination)
    temporary = destination.parent / f".{destination.name}.partial-{socket.gethostname()}-{os.getpid()}"
    try:
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        _publish(temporary, destination)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _disk_full(error, destination) from error
        raise


def require_space(destination: Path, nbytes: int) -> None:
    """Raises OSError (ENOSPC) before any work if the file system cannot hold `nbytes` beside what is there."""
    parent = Path(os.path.abspath(destination)).parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise OSError(
            errno.ENOSPC,
            f"export to {destination} needs {nbytes / 1e9:.3f} GB beside any earlier export, {free / 1e9:.3f} GB are "
            "free; free some space or choose another destination",
        )


def _disk_full(error: OSError, destination: Path) -> OSError:
    free = shutil.disk_usage(destination.parent).free / 1e9
    kept = f"the earlier export in {destination} is unchanged" if destination.exists() else "nothing was left there"
    return OSError(
        error.errno,
        f"export to {destination} stopped: {_FULL[error.errno or 0]} ({free:.2f} GB free); {kept}. "
        "Free some space or choose another destination",
    )


def _check_replaceable(destination: Path) -> None:
    if not os.path.lexists(destination):
        return
    folder = destination.is_dir() and not destination.is_symlink()
    if folder and ((destination / MANIFEST).is_file() or not any(destination.iterdir())):
        return
    raise FileExistsError(
        f"{destination} exists and is no export of this project (it has no {MANIFEST}); "
        "it will not be replaced: choose another destination or move it away"
    )


def _remove_stale(destination: Path) -> None:
    """Removes what killed exports of this machine left; puts back an earlier export they had set aside."""
    host = socket.gethostname()
    for aside in destination.parent.glob(f".{destination.name}.aside-{host}-*"):
        if not destination.exists():
            aside.rename(destination)
        else:
            shutil.rmtree(aside, ignore_errors=True)
    for path in destination.parent.glob(f".{destination.name}.partial-{host}-*"):
        pid = int(path.name.rsplit("-", 1)[1])
        if pid == os.getpid() or not _alive(pid):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _publish(temporary: Path, destination: Path) -> None:
    """Gives the finished folder its name; afterwards the earlier export, if any, is gone."""
    if not destination.exists():
        temporary.rename(destination)
    elif _exchange(temporary, destination):
        shutil.rmtree(temporary, ignore_errors=True)
    else:  # no renameat2 here: two renames, the earlier export is set aside for the instant between them
        aside = temporary.with_name(temporary.name.replace(".partial-", ".aside-", 1))
        destination.rename(aside)
        try:
            temporary.rename(destination)
        except BaseException:
            aside.rename(destination)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    descriptor = os.open(destination.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders' names atomically; False where the kernel, C library or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    result = renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, f"{os.strerror(code)}: exchanging {first} and {second}")


def write_json(path: Path, content: Mapping) -> None:
    """Writes a JSON file the way every file of an export is written: two spaces, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
