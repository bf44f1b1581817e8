"""Bytes and bits per weight as they lie on the disk."""

import pytest
import torch
from safetensors.torch import save_file

from eval.size import folder_size


def test_packed_folder(tmp_path):
    save_file({
        "a.weight_packed": torch.zeros(64, 16, dtype=torch.int32),
        "a.weight_scale": torch.zeros(64, 4, dtype=torch.bfloat16),
        "a.weight_shape": torch.tensor([64, 128]), "norm.weight": torch.zeros(128, dtype=torch.bfloat16),
    }, tmp_path / "model-00001-of-00002.safetensors")  # fmt: skip
    head = {"head.weight": torch.zeros(32, 128, dtype=torch.bfloat16)}
    save_file(head, tmp_path / "model-00002-of-00002.safetensors")
    size = folder_size(tmp_path)
    weights, plain = 64 * 128, 128 + 32 * 128
    assert size.bits_per_weight == 8 * (64 * 16 * 4 + 64 * 4 * 2 + 16) / weights
    assert size.packed_share == weights / (weights + plain)
    assert size.bytes == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert size.bits_per_parameter == 8 * size.bytes / (weights + plain)


def test_plain_folder_and_missing_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="save_pretrained or an export"):
        folder_size(tmp_path)
    save_file({"w": torch.zeros(100, 100, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    size = folder_size(tmp_path)
    assert size.bits_per_weight is None and size.packed_share == 0
    assert size.bits_per_parameter == pytest.approx(16, rel=0.01)
