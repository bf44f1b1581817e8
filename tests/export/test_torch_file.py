"""Files of torch.save: the same tensors as torch.load, in slices, and nothing in the pickle is run."""

import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from qdeepseek.export.torch_file import Opaque, StoredTensor, load

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool)


class Evil:
    """Creates a file when it is unpickled in the ordinary way."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_tensors_of_every_dtype_and_their_slices(tmp_path):
    base = torch.randn(7, 6) * 9
    content = {str(dtype): base.to(dtype) for dtype in DTYPES}
    content["view of a larger storage"] = torch.arange(100.0)[10:30].view(4, 5)
    content["empty"] = torch.empty(0, dtype=torch.bfloat16)
    content["scalar"] = torch.tensor(3.5)
    content["parameter"] = torch.nn.Parameter(torch.randn(3))
    content["float8"] = base.to(torch.float8_e4m3fn)
    torch.save(content, tmp_path / "file.pt")
    for name, stored in load(tmp_path / "file.pt").items():
        tensor = content[name].detach()
        assert isinstance(stored, StoredTensor) and stored.dtype == tensor.dtype and stored.shape == tuple(tensor.shape)
        assert torch.equal(stored.read().view(tensor.shape).float(), tensor.float()), name
        if tensor.numel() > 3:
            assert torch.equal(stored.read(2, 4).float(), tensor.reshape(-1)[2:4].float()), name


def test_containers_and_unknown_objects(tmp_path):
    content = {
        "shapes": OrderedDict(a=torch.Size((2, 3))), "dtype": torch.bfloat16, "set": {1, 2}, "none": None,
        "nested": [({"x": 1.5}, "text")], "path": tmp_path, "evil": Evil(tmp_path / "created"),
    }  # fmt: skip
    torch.save(content, tmp_path / "file.pt")
    found = load(tmp_path / "file.pt")
    assert found["shapes"] == {"a": (2, 3)} and found["dtype"] is torch.bfloat16 and found["set"] == {1, 2}
    assert found["nested"] == content["nested"] and found["none"] is None
    assert isinstance(found["path"], Opaque) and isinstance(found["evil"], Opaque)
    assert not (tmp_path / "created").exists()


def test_broken_files_are_refused(tmp_path):
    file = tmp_path / "file.pt"
    torch.save({"w": torch.randn(100, 100)}, file)
    whole = file.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"file\.pt is no complete file of torch\.save"):
            load(file)
    torch.save({"w": torch.randn(4, 6).t()}, file)
    with pytest.raises(ValueError, match="strides"):
        load(file)["w"].read()
