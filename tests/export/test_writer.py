"""An export appears whole or not at all: failures, kills and full disks leave the earlier one as it was."""

import errno
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qdeepseek.export import safetensors_file, writer
from qdeepseek.export.writer import INDEX, MANIFEST, SINGLE, ShardWriter, atomic_folder

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8, torch.bool,
          torch.float8_e4m3fn]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {str(dtype): torch.randn(3, 5).mul(4).to(dtype) for dtype in DTYPES} | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(12).view(3, 4).t(),
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def earlier_export(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    (folder / "old").write_text("old")
    return folder


def siblings(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def test_file_is_read_by_the_library_and_reads_the_librarys(tmp_path):
    import hashlib

    content = tensors()
    digest = safetensors_file.write(tmp_path / "a", content, {"format": "pt"})
    assert digest == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    loaded = load_file(tmp_path / "a")
    assert all(torch.equal(bits(loaded[name]), bits(content[name])) for name in content)
    assert safetensors_file.read_metadata(tmp_path / "a") == {"format": "pt"}

    save_file({name: t.contiguous() for name, t in content.items()}, tmp_path / "b", {"note": "x"})
    header = safetensors_file.read_header(tmp_path / "b")
    for name, expected in content.items():
        tensor = safetensors_file.read_tensor(tmp_path / "b", header[name])
        assert tensor.dtype == expected.dtype and torch.equal(bits(tensor), bits(expected))


def test_buffer_writes_the_same_file(tmp_path, monkeypatch):
    """Also where tensors span chunks."""
    content = tensors()
    digest = safetensors_file.write(tmp_path / "a", content, {"format": "pt"})
    for size in (mmap.PAGESIZE, 1, 7, 20):
        monkeypatch.setattr(safetensors_file.Buffer, "CHUNK", size)
        buffer = safetensors_file.Buffer()
        for name, tensor in content.items():
            buffer.add(name, tensor)
        assert buffer.nbytes == sum(tensor.nbytes for tensor in content.values())
        assert buffer.write(tmp_path / "b", {"format": "pt"}) == digest
        assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_broken_file_is_named(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    safetensors_file.write(path, tensors())
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-1], "header": data[:8] + b"?" * (len(data) - 8), "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"model\.safetensors is no complete safetensors file"):
        safetensors_file.read_header(path)


def test_shards_index_and_single_file(tmp_path):
    content = {f"t{i}": torch.full((100,), i, dtype=torch.float32) for i in range(5)}  # 400 bytes each
    for folder, size in (("one", 5_000), ("many", 900)):
        (tmp_path / folder).mkdir()
        shards = ShardWriter(tmp_path / folder, size)
        for name, tensor in content.items():
            shards.add(name, tensor)
        files = shards.finish()
        assert sorted(p.name for p in (tmp_path / folder).glob("*.safetensors")) == sorted(files)
        for file, written in files.items():
            assert (tmp_path / folder / file).stat().st_size == written.bytes
    assert list((tmp_path / "one").iterdir()) == [tmp_path / "one" / SINGLE]
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 2000
    assert len(set(index["weight_map"].values())) == 3 and set(index["weight_map"]) == set(content)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "many" / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), content[name])


def test_a_name_twice_is_refused(tmp_path):
    shards = ShardWriter(tmp_path)
    shards.add("w", torch.zeros(1))
    with pytest.raises(ValueError, match="tensor w is written twice"):
        shards.add("w", torch.zeros(1))


def test_success_replaces_an_earlier_export(tmp_path):
    destination = earlier_export(tmp_path / "export")
    with atomic_folder(destination) as folder:
        (folder / MANIFEST).write_text("new")
        assert (destination / "old").exists()
    assert [p.name for p in destination.iterdir()] == [MANIFEST]
    assert siblings(destination) == ["export"]


def test_success_without_renameat2(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_exchange", lambda first, second: False)
    destination = earlier_export(tmp_path / "export")
    with atomic_folder(destination) as folder:
        (folder / MANIFEST).write_text("new")
    assert (destination / MANIFEST).read_text() == "new" and siblings(destination) == ["export"]


def test_an_export_set_aside_by_a_killed_process_comes_back(tmp_path):
    """Where folders cannot be exchanged, a kill between the two renames leaves the earlier export aside."""
    earlier_export(tmp_path / f".export.aside-{socket.gethostname()}-1")
    with pytest.raises(RuntimeError, match="bug"), atomic_folder(tmp_path / "export"):
        raise RuntimeError("bug")
    assert siblings(tmp_path / "export") == ["export"] and (tmp_path / "export" / "old").exists()


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt(), OSError(errno.EIO, "I/O error")])
@pytest.mark.parametrize("earlier", [True, False])
def test_any_failure_leaves_what_was(tmp_path, error, earlier):
    destination = tmp_path / "deep" / "export"
    if earlier:
        earlier_export(destination)
    with pytest.raises(type(error)), atomic_folder(destination) as folder:
        (folder / "half").write_text("half")
        raise error
    assert siblings(destination) == (["export"] if earlier else [])
    assert not earlier or (destination / "old").read_text() == "old"


def test_full_disk_says_so(tmp_path, monkeypatch):
    destination = earlier_export(tmp_path / "export")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(OSError, match=r"no space left on the device .*earlier export .* is unchanged") as caught,
        atomic_folder(destination) as folder,
    ):
        safetensors_file.write(folder / SINGLE, tensors())
    assert caught.value.errno == errno.ENOSPC
    assert (destination / "old").read_text() == "old" and siblings(destination) == ["export"]


def test_foreign_folder_is_not_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    for destination in (tmp_path / "home", tmp_path / "home" / "letter"):
        with pytest.raises(FileExistsError, match="is no export of this project"), atomic_folder(destination):
            pass
    assert (tmp_path / "home" / "letter").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    with atomic_folder(tmp_path / "empty") as folder:
        (folder / "x").write_text("x")
    assert (tmp_path / "empty" / "x").exists()


CHILD = """
import resource, sys, time
from pathlib import Path
import torch
from qdeepseek.export.writer import ShardWriter, atomic_folder
mode, destination = sys.argv[1], Path(sys.argv[2])
if mode == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with atomic_folder(destination) as folder:
    shards = ShardWriter(folder, 1_000_000)
    for i in range(20):
        shards.add(f"t{i}", torch.zeros(50_000))
        if mode == "kill" and i == 15:
            print("ready", flush=True)
            time.sleep(60)
    shards.finish()
"""


def run_child(mode: str, destination: Path) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, mode, str(destination)],
        env=os.environ | {"PYTHONPATH": str(root)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_file_size_limit_of_the_system(tmp_path):
    destination = earlier_export(tmp_path / "export")
    _, stderr = (child := run_child("limit", destination)).communicate(timeout=60)
    assert child.returncode == 1 and "the file size limit is reached" in stderr
    assert (destination / "old").read_text() == "old" and siblings(destination) == ["export"]


@pytest.mark.slow
def test_sigkill_leaves_the_earlier_export_and_the_next_one_cleans_up(tmp_path):
    destination = earlier_export(tmp_path / "export")
    child = run_child("kill", destination)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert (destination / "old").read_text() == "old" and len(siblings(destination)) == 2
    with atomic_folder(destination) as folder:
        (folder / MANIFEST).write_text("new")
    assert siblings(destination) == ["export"] and not (destination / "old").exists()


@pytest.mark.slow
def test_full_tmpfs(tmp_path):
    """A real full disk: a 4 MB tmpfs, where the kernel lets this user mount one."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount]).returncode:
        # mounting is root's; test_full_disk_says_so raises the same ENOSPC everywhere
        pytest.skip("no right to mount a tmpfs here")
    try:
        destination = earlier_export(mount / "export")
        with (
            pytest.raises(OSError, match="no space left on the device"),
            atomic_folder(destination) as folder,
        ):
            shards = ShardWriter(folder, 1_000_000)
            for i in range(40):
                shards.add(f"t{i}", torch.zeros(50_000))
            shards.finish()
        assert (destination / "old").read_text() == "old" and siblings(destination) == ["export"]
    finally:
        time.sleep(0.1)
        subprocess.run(["umount", mount], check=True)
