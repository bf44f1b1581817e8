"""The counted size of an export is that of the export, to the byte."""

import pytest
import torch
from safetensors import safe_open

from qdeepseek.export.compressed_tensors import export
from qdeepseek.export.entries import entries_of
from qdeepseek.export.size import export_size
from qdeepseek.surgery import Recipe, prepare
from tests.train.test_config import composed


@pytest.mark.parametrize(
    "words",
    [
        ["quant=w4a16_g32"],
        ["quant=w4a16_g128"],
        ["quant=mixed"],
        ["quant=w3a16_g32"],
        ["quant=w4a16_g32", "quant.schemes.main.weight.symmetric=false"],
        ["quant=w4a16_g32", "quant.schemes.main.weight.granularity=per_tensor", "quant.rules.lm_head.scheme=int8"],
    ],
    ids=" ".join,
)
def test_tensors_of_a_real_export(words, tiny_model, tmp_path):
    prepare(tiny_model, Recipe.from_config(composed(*words, "run_dir=x")["quant"]))
    counted = export_size(entries_of(tiny_model), torch.bfloat16)
    folder = export(tiny_model, tmp_path / "export", dtype=torch.bfloat16).folder
    sizes: dict[str, int] = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118, not a mapping
            tensor, kind = file.get_tensor(name), name.rpartition(".")[2]
            sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
            sizes["tensors"] = sizes.get("tensors", 0) + 1
    assert counted.codes == sizes.pop("weight_packed")
    assert counted.scales == sizes.pop("weight_scale")
    assert counted.zero_points == sizes.pop("weight_zero_point", 0)
    assert counted.shapes == sizes.pop("weight_shape")
    assert counted.tensors == sizes.pop("tensors")
    assert counted.kept == sum(sizes.values())
    file_bytes = (folder / "model.safetensors").stat().st_size
    assert counted.total < file_bytes < counted.total + 120 * counted.tensors  # the header
