"""A folder (or file) of safetensors as one mapping from name to tensor, read a tensor at a time.

FP8 block-quantised checkpoints (DeepSeek-V3) keep W as float8_e4m3 with one fp32 factor for each block, 128 × 128 or
what `weight_block_size` in the folder's config.json says. `read` returns W in bf16 (surgery/fp8.py), and the factors
are not listed among the names.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from qdeepseek.export import safetensors_file
from qdeepseek.export.safetensors_file import TensorInfo
from qdeepseek.export.writer import INDEX
from qdeepseek.surgery.fp8 import dequantize_fp8

FP8_BLOCK = (128, 128)
FP8_FACTOR = "_scale_inv"


class Checkpoint:
    """Tensors of a checkpoint folder, or of a single safetensors file.

    Raises FileNotFoundError for a missing folder, shard or weight file, ValueError for a broken shard.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._tensors: dict[str, tuple[Path, TensorInfo]] = {}
        for shard in _shards(self.path):
            for name, info in safetensors_file.read_header(shard).items():
                if name in self._tensors:
                    raise ValueError(
                        f"{name} is in {self._tensors[name][0].name} and in {shard.name} of {self.path}; "
                        "remove the shards of the other checkpoint"
                    )
                self._tensors[name] = (shard, info)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        """Names in the order of the shards, without the factors of FP8 weights."""
        return (n for n in self._tensors if not self._is_factor(n))

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape as stored."""
        return self._find(name)[1]

    def read(self, name: str, dequantized: torch.dtype = torch.bfloat16) -> Tensor:
        """The tensor, in memory of its own; an FP8 weight as `dequantized`."""
        shard, info = self._find(name)
        tensor = safetensors_file.read_tensor(shard, info)
        if info.dtype != torch.float8_e4m3fn or name + FP8_FACTOR not in self._tensors:
            return tensor
        factor_shard, factor_info = self._tensors[name + FP8_FACTOR]
        factors = safetensors_file.read_tensor(factor_shard, factor_info)
        return dequantize_fp8(tensor, factors, _fp8_block(self.path), dequantized, name)

    def _find(self, name: str) -> tuple[Path, TensorInfo]:
        if name not in self._tensors:
            near = [n for n in self._tensors if n.rpartition(".")[0] == name.rpartition(".")[0]][:3]
            there = f"there are {', '.join(near)}" if near else f"it holds {len(self._tensors)} others"
            raise ValueError(f"{self.path} has no tensor {name} ({there}); is it the checkpoint of this model?")
        return self._tensors[name]

    def _is_factor(self, name: str) -> bool:
        return name.endswith(FP8_FACTOR) and name.removesuffix(FP8_FACTOR) in self._tensors


def _fp8_block(path: Path) -> tuple[int, int]:
    """Block size of the checkpoint's FP8 weights."""
    config = path / "config.json"
    quantization = json.loads(config.read_text()).get("quantization_config") if config.is_file() else None
    rows, columns = (quantization or {}).get("weight_block_size") or FP8_BLOCK
    return rows, columns


def _shards(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; give a checkpoint folder or a safetensors file")
    index = path / INDEX
    if not index.is_file():
        shards = sorted(path.glob("*.safetensors"))
        if not shards:
            raise FileNotFoundError(
                f"{path} holds no *.safetensors; convert pickled weights with save_pretrained first"
            )
        return shards
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors shards: {error!r}") from error
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{path} lacks {len(missing)} of {len(names)} shards of its index, first {missing[0]}; download it again"
        )
    return [path / name for name in names]
