"""verify finds every kind of damage."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from qdeepseek.export.compressed_tensors import export
from qdeepseek.export.verify import verify
from qdeepseek.export.writer import MANIFEST, SINGLE

MODULE = "model.layers.1.mlp.experts.2.up_proj"


@pytest.fixture
def exported(make_prepared, tmp_path):
    model = make_prepared()
    export(model, tmp_path / "e")
    return model, tmp_path / "e"


def rewrite(folder, change):
    """Changes tensors and updates the hash in the manifest, so that only the content gives the change away."""
    import hashlib

    path = folder / SINGLE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    manifest = json.loads((folder / MANIFEST).read_text())
    data = path.read_bytes()
    manifest["files"][SINGLE] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_sound_export(exported):
    model, folder = exported
    report = verify(folder, model)
    assert report.ok and report.quantized_modules == 28 and report.to_dict()["ok"]
    assert "equal bit for bit to compressed-tensors" in str(report) and "the prepared model" in str(report)


def flip(name, index=0):
    def change(tensors):
        tensors[name].view(-1)[index] ^= 1

    return change


def put(name, value):
    def change(tensors):
        tensors[name] = value if isinstance(value, torch.Tensor) else torch.full_like(tensors[name], value)

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (put(f"{MODULE}.weight_scale", torch.nan), "not finite and positive"),
        (put(f"{MODULE}.weight_scale", -1), "not finite and positive"),
        (put(f"{MODULE}.weight_scale", torch.ones(32, 2)), r"weight_scale is torch\.float32, trained was bfloat16"),
        (put(f"{MODULE}.weight_shape", torch.tensor([32, 128])), "do not hold 128 codes|shape"),
        (put(f"{MODULE}.weight_packed", torch.zeros(32, 4, dtype=torch.int32)), "do not hold 64 codes"),
        (lambda t: t.pop(f"{MODULE}.weight_scale"), "has no tensor"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (put("model.extra.weight", torch.zeros(3)), r"model\.extra\.weight is stored and not in the manifest"),
    ],
)  # fmt: skip
def test_damaged_tensors(exported, change, problem):
    import re

    _, folder = exported
    rewrite(folder, change)
    report = verify(folder)
    assert not report.ok and re.search(problem, str(report)), str(report)


def test_one_changed_code_is_found_by_the_model(exported):
    model, folder = exported
    rewrite(folder, flip(f"{MODULE}.weight_packed", 5))
    assert verify(folder).ok
    report = verify(folder, model)
    assert report.problems == (f"{MODULE}: codes of the export and of the model differ",)


def test_a_reader_that_is_wrong_is_found_by_the_reference(exported, monkeypatch):
    from qdeepseek.export import loader

    _, folder = exported
    right = loader.unpack
    monkeypatch.setattr(loader, "unpack", lambda *a: right(*a).roll(1, 1))
    assert f"{MODULE}: compressed-tensors decompresses it to other weights" in verify(folder).problems


def test_files(exported):
    _, folder = exported
    (folder / "generation_config.json").unlink()
    (folder / "surplus").write_text("x")
    data = bytearray((folder / SINGLE).read_bytes())
    data[-1] ^= 1
    (folder / SINGLE).write_bytes(data)
    text = str(verify(folder))
    for problem in ("generation_config.json is missing", "surplus is not listed", f"{SINGLE} was changed"):
        assert problem in text
    (folder / MANIFEST).write_text("{}")
    assert "cannot be read" in str(verify(folder))
    (folder / MANIFEST).unlink()
    assert not verify(folder).ok


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda q: q["ignore"].append(r"re:.*o_proj$"), "ignores model.layers.0.self_attn.o_proj, which is quantised"),
        (lambda q: q["ignore"].remove("lm_head"), "quantises lm_head, which is kept"),
        (lambda q: q["ignore"].pop(), "quantises model.layers.1.mlp.gate, which is kept"),
        (lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8), "gives model.layers.0"),
        (lambda q: q["config_groups"]["group_0"].update(targets=["re:.*experts"]), "has no target for model.layers.0"),
    ],
)  # fmt: skip
def test_config_that_says_something_else(exported, change, problem):
    _, folder = exported
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    assert problem in str(verify(folder, reference=False))
