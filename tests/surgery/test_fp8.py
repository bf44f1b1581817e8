"""A tiny DeepSeek-V3 checkpoint in FP8 blocks, as DeepSeek publishes them, loads as exactly its dequantised weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from surgery_models import load_recipe

from qdeepseek.surgery import prepare
from qdeepseek.surgery.fp8 import dequantize_fp8, load_causal_lm

FP8 = torch.float8_e4m3fn
BLOCK = 128


def quantize_blocks(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(fp8 codes, scale_inv, bf16 product): block by block, written as a loop to be obviously right."""
    rows, columns = weight.shape
    codes, served = torch.empty(rows, columns, dtype=FP8), torch.empty(rows, columns, dtype=torch.bfloat16)
    scale = torch.empty(-(-rows // block), -(-columns // block))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scale[i, j]).to(FP8)
            served[part] = (codes[part].float() * scale[i, j]).bfloat16()
    return codes, scale, served


@pytest.mark.parametrize("shape", [(128, 128), (576, 256), (160, 128), (64, 96), (130, 300)])
def test_dequantize_with_ragged_last_blocks(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 9, shape[0])[:, None]
    codes, scale, served = quantize_blocks(weight, BLOCK)
    assert torch.equal(dequantize_fp8(codes, scale, (BLOCK, BLOCK)), served)
    stacked = dequantize_fp8(torch.stack([codes, codes]), torch.stack([scale, 2 * scale]), (BLOCK, BLOCK))
    assert torch.equal(stacked[0], served)
    assert torch.equal(stacked[1], 2 * served)


def test_a_scale_grid_of_another_block_size_is_refused():
    with pytest.raises(
        ValueError, match=r"q_proj: a weight of \(256, 128\) in blocks of .* has \(2, 1\) scales.*\(4, 2\)"
    ):
        dequantize_fp8(torch.zeros(256, 128).to(FP8), torch.ones(4, 2), name="q_proj")


@pytest.fixture
def checkpoint(tiny_model, tmp_path):
    """(folder, bf16 weights that it stands for under their transformers names, fused experts included)."""
    config = tiny_model.config.to_dict()
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    config["num_nextn_predict_layers"] = 1
    with torch.no_grad():  # blocks of very different size: a scale taken from the wrong block shows
        tiny_model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight[BLOCK:] *= 50
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}

    def add(name: str, weight: torch.Tensor) -> torch.Tensor:
        codes, scale, served = quantize_blocks(weight, BLOCK)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = codes, scale
        return served

    for name, weight in tiny_model.state_dict().items():
        prefix, _, key = name.rpartition(".")
        if key == "gate_up_proj":
            halves = [w.chunk(2) for w in weight]
            expected[name] = torch.stack([
                torch.cat([add(f"{prefix}.{e}.gate_proj", gate), add(f"{prefix}.{e}.up_proj", up)])
                for e, (gate, up) in enumerate(halves)
            ])  # fmt: skip
        elif key == "down_proj":
            expected[name] = torch.stack([add(f"{prefix}.{e}.down_proj", w) for e, w in enumerate(weight)])
        elif "_proj" in prefix:
            expected[name] = add(prefix, weight)
        else:
            expected[name] = tensors[name] = weight if ".gate." in name else weight.bfloat16()
    folder = tmp_path / "fp8"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, expected


def test_fp8_checkpoint_loads_dequantised(checkpoint):
    folder, expected = checkpoint
    model = load_causal_lm(folder)
    state = model.state_dict()
    assert set(state) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(state[name], weight), name
    assert state["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape[0] == 160  # 1.25 blocks
    assert state["model.layers.1.mlp.gate.weight"].dtype == torch.float32


def test_it_is_then_an_ordinary_model(checkpoint, tmp_path):
    folder, expected = checkpoint
    model = load_causal_lm(folder, dtype=torch.float32)
    assert getattr(model.config, "quantization_config", None) is None
    assert prepare(model, load_recipe("w4a16_g32")).expert_share == 1.0
    model(torch.arange(8)[None]).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None

    plain = load_causal_lm(folder)
    plain.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    again = load_causal_lm(tmp_path / "plain").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in expected.items())


def test_a_wrong_block_size_in_the_config_is_refused(checkpoint):
    folder, _ = checkpoint
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"_proj.weight: a weight of .* in blocks of \(64, 64\) has .*weight_block_size"
    ):
        load_causal_lm(folder)


def test_a_missing_scale_and_a_broken_file_are_refused(checkpoint):
    folder, _ = checkpoint
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts.3.up_proj.weight is FP8 but .*weight_scale_inv is in no shard"):
        load_causal_lm(folder)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read .*broken or incomplete"):
        load_causal_lm(folder)


def test_other_quantisations_and_missing_folders_are_refused(checkpoint):
    folder, _ = checkpoint
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json: quantization_config.quant_method is 'gptq'; only"):
        load_causal_lm(folder)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        load_causal_lm(folder)
