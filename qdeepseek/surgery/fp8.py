"""Loads FP8 block-quantised checkpoints (DeepSeek-V3, R1) dequantised to bf16, ready to be trained.

    w[i, j] = fp8[i, j] * scale_inv[i // B, j // B],    B = 128 (`weight_block_size`), one fp32 scale for a block

Shards hold `x.weight` (float8_e4m3fn) and `x.weight_scale_inv`; norms, router, embedding and head are bf16 or fp32. The
last block of a dimension may be ragged: `kv_a_proj_with_mqa` of DeepSeek-V3 has 576 = 4.5 blocks of rows. transformers
reads such files, fuses the experts and never writes a copy to disk, but its own operator (5.24) takes the block size
from the shape of the scale grid: 576 rows over 5 scales raise, and 160 rows over 2 scales are dequantised in blocks of
80, silently wrong. So this file hands it an operator that goes by the configured block size, through transformers'
registry of quantisers.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_METHOD = "fp8_by_block_size"


def dequantize_fp8(
    weight_OI: Tensor,
    scale_inv: Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    name: str = "weight",
) -> Tensor:
    """weight (.., O, I) in FP8 times its scale, (.., ceil(O / block[0]), ceil(I / block[1])), rounded once to `dtype`.

    Raises ValueError when the scale grid does not belong to the weight.
    """
    rows, columns = weight_OI.shape[-2:]
    _check_grid(name, (rows, columns), scale_inv.shape[-2:], block)
    scale = scale_inv.to(torch.float32)
    scale = scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return (weight_OI.to(torch.float32) * scale).to(dtype)


def _check_grid(name: str, weight: Sequence[int], scale: Sequence[int], block: tuple[int, int]) -> None:
    grid = tuple(-(-size // b) for size, b in zip(weight, block))
    if tuple(scale) != grid:
        raise ValueError(
            f"{name}: a weight of {tuple(weight)} in blocks of {block} has {grid} scales, the checkpoint has "
            f"{tuple(scale)}; check weight_block_size in its config.json"
        )


def check_fp8_files(folder: Path, block: tuple[int, int]) -> None:
    """Reads the headers of all shards: every FP8 weight has a scale grid of the right shape, or ValueError."""
    shapes: dict[str, tuple[str, list[int]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as shard:
                parts = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118, not a mapping
                shapes |= {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}); it is broken or incomplete, fetch it again") from error
    for name, (dtype, shape) in shapes.items():
        if dtype != "F8_E4M3":
            continue
        scale = shapes.get(f"{name}_scale_inv") or shapes.get(f"{name.removesuffix('.weight')}.scale")
        if scale is None:
            raise ValueError(f"{folder}: {name} is FP8 but {name}_scale_inv is in no shard; is the download complete?")
        _check_grid(name, shape, scale[1], block)


def load_causal_lm(folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)`, FP8 checkpoints dequantised to `dtype`.

    The result carries no quantisation config: it trains and saves as an ordinary model. Raises FileNotFoundError when
    there is no config.json, ValueError for a checkpoint quantised in another way.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path / 'config.json'} does not exist; model.path must be a local folder as written by save_pretrained "
            "or downloaded from the Hub"
        )
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(path)
    quantization = check_trainable(path, config)
    if quantization is not None:
        _register()
        config.quantization_config = {**quantization, "quant_method": _METHOD, "dequantize": True}
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, **kwargs)


def check_trainable(folder: Path, config: Any) -> dict[str, Any] | None:
    """The config's FP8 quantisation, or None for an unquantised checkpoint.

    Raises ValueError for a checkpoint quantised in another way, or whose FP8 scales do not belong to its weights.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method != "fp8":
        raise ValueError(
            f"{folder / 'config.json'}: quantization_config.quant_method is {method!r}; only unquantised and fp8 "
            "checkpoints can be fine-tuned, start from the original weights"
        )
    if (block := quantization.get("weight_block_size")) is not None:
        check_fp8_files(folder, tuple(block))
    return quantization


@cache
def _register() -> None:
    """Tells transformers about a quantiser that differs from its FP8 one by a single operator."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    class DequantizeByBlockSize(Fp8Dequantize):
        def _dequantize_one(self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
            block = self.hf_quantizer.quantization_config.weight_block_size
            if quantized.dtype != torch.float8_e4m3fn or scales.dtype == torch.uint8 or block is None:
                return super()._dequantize_one(quantized, scales, output_dtype)  # V4's FP4 experts, per-tensor scales
            return dequantize_fp8(quantized, scales, tuple(block), output_dtype or torch.bfloat16)

    @register_quantization_config(_METHOD)
    class Config(FineGrainedFP8Config):
        pass

    @register_quantizer(_METHOD)
    class Quantizer(FineGrainedFP8HfQuantizer):
        def get_load_operations(self) -> dict[str, type]:
            return {"dequantize": DequantizeByBlockSize}
