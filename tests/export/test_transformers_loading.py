"""What plain `AutoModelForCausalLM.from_pretrained(folder)` makes of an export (docs/export.md holds the table)."""

import pytest
import torch
import transformers

from qdeepseek.export.compressed_tensors import export
from qdeepseek.export.loader import load

MAIN = "schemes__main__weight__"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def both(folder, empty_model, ids, **arguments):
    """Logits and weights through transformers, and through this project's loader in the same dtypes."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments).eval()
    with torch.no_grad():
        logits = theirs(ids).logits  # decompresses on the first forward
    ours = load(empty_model(folder, theirs.lm_head.weight.dtype), folder)
    with torch.no_grad():
        return theirs, ours, logits, ours(ids).logits


@pytest.mark.parametrize("name", ["w4a16_g32", "w3a16_g32", "w2a16_g32", "mixed", "w4_experts_only"])
def test_bf16_is_exact(name, make_recipe, make_prepared, empty_model, ids, tmp_path):
    recipe = make_recipe(name)
    export(make_prepared(recipe), tmp_path / "e", recipe=recipe)
    theirs, ours, logits, expected = both(tmp_path / "e", empty_model, ids)
    weights = theirs.state_dict()
    for parameter, value in ours.state_dict().items():
        assert weights[parameter].dtype == value.dtype and torch.equal(weights[parameter], value), parameter
    assert logits.dtype == torch.bfloat16 and torch.equal(logits, expected)


def test_fp32_is_exact_with_fp32_scales(make_recipe, make_prepared, empty_model, ids, tmp_path):
    recipe = make_recipe(**{MAIN + "scale_dtype": "float32", MAIN + "serve_dtype": None})
    model = make_prepared(recipe)
    export(model, tmp_path / "e", dtype=torch.float32)
    _, _, logits, expected = both(tmp_path / "e", empty_model, ids)
    with torch.no_grad():
        assert torch.equal(logits, expected) and torch.equal(logits, model(ids).logits)


def test_fp32_with_bf16_scales(make_recipe, make_prepared, empty_model, ids, tmp_path):
    """The default recipe: trained in fp32 on products rounded to bf16. transformers multiplies codes and scales of
    Linear layers in the model's dtype and leaves experts in the scale's; dequantised on loading and cast to fp32 as a
    whole, the model is the trained one bit for bit."""
    model = make_prepared(make_recipe())
    export(model, tmp_path / "e", dtype=torch.float32)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    theirs, ours, logits, expected = both(tmp_path / "e", empty_model, ids, quantization_config=config)
    weights = theirs.state_dict()
    assert all(torch.equal(weights[name].float(), value) for name, value in ours.state_dict().items())
    assert weights["model.layers.1.mlp.experts.down_proj"].dtype == torch.bfloat16
    with torch.no_grad():
        trained = model(ids).logits
        assert torch.equal(expected, trained) and torch.equal(theirs.float()(ids).logits, trained)
    assert not torch.equal(logits, trained)  # its experts multiplied in bf16
    assert not torch.equal(both(tmp_path / "e", empty_model, ids)[2], trained)


def test_asymmetric_experts_are_refused_by_transformers(make_recipe, make_prepared, tmp_path):
    export(make_prepared(make_recipe(**{MAIN + "symmetric": False})), tmp_path / "e")
    with pytest.raises(RuntimeError, match="issues during automatic conversion of the weights"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "e")


def test_a_dense_model(make_recipe, make_prepared, empty_model, ids, tmp_path):
    recipe = make_recipe()
    export(make_prepared(recipe, "qwen2"), tmp_path / "e", recipe=recipe)
    _, _, logits, expected = both(tmp_path / "e", empty_model, ids)
    assert torch.equal(logits, expected)
