"""Reading checkpoints: sharded or single, FP8 blocks, and what is wrong with a broken one."""

import json

import pytest
import torch
from safetensors.torch import save_file

from qdeepseek.export.checkpoint import Checkpoint
from qdeepseek.export.writer import INDEX


def shards(folder, *contents):
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number, content in enumerate(contents):
        file = f"model-{number}.safetensors"
        save_file(content, folder / file)
        weight_map |= dict.fromkeys(content, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shards_and_single_file(tmp_path):
    a, b = torch.randn(3, 4), torch.randn(5).bfloat16()
    checkpoint = Checkpoint(shards(tmp_path / "c", {"a": a}, {"b": b}))
    assert list(checkpoint) == ["a", "b"] and "a" in checkpoint and "c" not in checkpoint
    assert torch.equal(checkpoint.read("a"), a) and torch.equal(checkpoint.read("b"), b)
    assert checkpoint.info("b").shape == (5,) and checkpoint.info("b").dtype == torch.bfloat16
    assert list(Checkpoint(tmp_path / "c" / "model-0.safetensors")) == ["a"]


def test_what_is_missing_is_named(tmp_path):
    folder = shards(tmp_path / "c", {"x.weight": torch.zeros(1)}, {"b": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"has no tensor x\.bias \(there are x\.weight\)"):
        Checkpoint(folder).read("x.bias")
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks 1 of 2 shards of its index, first model-1\.safetensors"):
        Checkpoint(folder)
    (folder / INDEX).write_text("[]")
    with pytest.raises(ValueError, match="no index of safetensors shards"):
        Checkpoint(folder)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no \*\.safetensors"):
        Checkpoint(tmp_path / "empty")


@pytest.mark.parametrize("size", [128, 64])
@pytest.mark.parametrize("shape", [(128, 256), (200, 130), (64, 64)])
def test_fp8_blocks(tmp_path, shape, size):
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    factors = torch.rand(-(-shape[0] // size), -(-shape[1] // size))
    expected = torch.empty(shape, dtype=torch.bfloat16)
    for i in range(shape[0]):
        for j in range(0, shape[1], size):
            block = slice(j, min(j + size, shape[1]))
            expected[i, block] = (weight[i, block].float() * factors[i // size, j // size]).bfloat16()
    folder = shards(tmp_path / "c", {"w": weight}, {"w_scale_inv": factors})
    if size != 128:
        (folder / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [size, size]}}))
    checkpoint = Checkpoint(folder)
    assert list(checkpoint) == ["w"] and torch.equal(checkpoint.read("w"), expected)


def test_fp8_factors_of_another_shape_are_refused(tmp_path):
    weight = torch.zeros(200, 130).to(torch.float8_e4m3fn)
    folder = shards(tmp_path / "c", {"w": weight}, {"w_scale_inv": torch.ones(4, 2)})
    with pytest.raises(ValueError, match=r"w: a weight of \(200, 130\) in blocks of \(128, 128\) has \(2, 2\) scales"):
        Checkpoint(folder).read("w")
