"""`qdeepseek verify` on a good export, a damaged one and a folder that is none."""

import torch
from typer.testing import CliRunner

from qdeepseek.cli import app
from qdeepseek.export.compressed_tensors import export
from qdeepseek.surgery import Recipe, prepare
from tests.train.test_config import composed


def test_verify(tiny_model, tmp_path):
    prepare(tiny_model, Recipe.from_config(composed("run_dir=x")["quant"]))
    folder = export(tiny_model, tmp_path / "export", dtype=torch.float32).folder
    good = CliRunner().invoke(app, ["verify", str(folder)])
    assert good.exit_code == 0 and "verified" in good.output

    shard = folder / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    damaged = CliRunner().invoke(app, ["verify", str(folder)])
    assert damaged.exit_code == 1 and "model.safetensors" in damaged.output

    none = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert none.exit_code == 1 and "qdeepseek_manifest.json" in none.output
