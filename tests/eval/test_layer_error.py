"""Relative errors of weights and hidden states, layer by layer."""

import copy

import pytest
import torch

from eval.error_map import ErrorMap
from eval.layer_error import hidden_error, relative_error, weight_error
from qdeepseek.quant import QuantScheme
from qdeepseek.surgery import Recipe, Rule, TensorScheme, prepare, quantized_tensors

RECIPE = Recipe("test", (Rule(r"model\.layers\.\d+\.mlp\.(?!gate$).*", TensorScheme(QuantScheme(group_size=32))),),
                min_expert_share=0.0)  # fmt: skip


def ids():
    return torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


def test_relative_error_against_float64():
    w = torch.randn(3, 4, 5)
    w_hat = w + 0.1 * torch.randn(3, 4, 5)
    expected = ((w_hat - w).double().norm() / w.double().norm()).item()
    assert relative_error(w_hat, w) == pytest.approx(expected, rel=1e-6)
    assert relative_error(w_hat[0], w[0]) != pytest.approx(expected, rel=1e-3)
    assert relative_error(w, w) == 0 == relative_error(torch.zeros(2, 2), torch.zeros(2, 2))


def test_weights_of_a_prepared_model_are_those_served(tiny_model):
    reference = copy.deepcopy(tiny_model)
    prepare(tiny_model, RECIPE)
    found = weight_error(tiny_model, reference)
    assert found.layers == (0, 1, 2) and "experts.gate_up_proj" in found.parts and "q_a_proj" not in found.parts
    dense, sparse = found.parts.index("down_proj"), found.parts.index("experts.down_proj")
    assert found.error[0][sparse] is None and found.error[1][dense] is None
    tensor = next(t for t in quantized_tensors(tiny_model) if t.name == "model.layers.1.mlp.experts.down_proj")
    codes, scale, _ = tensor.quantizer.quantize(tensor.weight)
    w_hat = (codes.float().unflatten(-1, (-1, 32)) * scale.float()[..., None]).flatten(-2)
    assert found.error[1][sparse] == pytest.approx(relative_error(w_hat, tensor.weight.detach()), rel=1e-6)
    assert 0.03 < found.error[1][sparse] < 0.2  # 4 bits on a Gaussian


def test_names_choose_the_weights_of_a_plain_model(tiny_model):
    model = copy.deepcopy(tiny_model)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(1.5)
    found = weight_error(model, tiny_model, names=["model.layers.1.self_attn.o_proj.weight", "lm_head.weight"])
    assert found == ErrorMap((1,), ("o_proj",), ((pytest.approx(0.5),),))
    assert {"o_proj", "experts.down_proj", "gate"} <= set(weight_error(model, tiny_model).parts)


def test_hidden_error_starts_where_the_change_is(tiny_model):
    model = copy.deepcopy(tiny_model)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(1.1)
    batch = {"input_ids": ids(), "labels": ids()}
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    found = hidden_error({"qat": model, "fp_ft": tiny_model}, tiny_model, [batch, batch])
    assert found["qat"].parts == ("attention", "MLP", "residual") and found["qat"].layers == (0, 1, 2)
    assert found["qat"].error[0] == (0, 0, 0) and found["qat"].error[1][0] == 0
    assert min(found["qat"].error[1][1:] + found["qat"].error[2]) > 0
    assert all(cell == 0 for row in found["fp_ft"].error for cell in row)
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    with torch.no_grad():
        h, r = (m(input_ids=ids(), output_hidden_states=True).hidden_states[2] for m in (model, tiny_model))
    assert found["qat"].error[1][2] == pytest.approx(((h - r).norm() / r.norm()).item(), rel=1e-5)


def test_round_trip_through_json():
    found = ErrorMap.from_cells({(2, "a"): 0.5, (0, "b"): 0.25})
    assert found.layers == (0, 2) and found.error == ((None, 0.25), (0.5, None))
    assert ErrorMap.from_dict(found.to_dict()) == found
