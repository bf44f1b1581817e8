"""The peers cover what the plan says, leave the model alone, and are missed politely where they are not installed."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import peers
from qdeepseek.surgery import Recipe, plan

QUANT = Path(__file__).parents[2] / "conf" / "quant"


def planned(model, name):
    return plan(model, Recipe.from_config(yaml.safe_load((QUANT / f"{name}.yaml").read_text())))


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.fixture
def windows():
    return torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


def test_unfused_experts_compute_the_same_and_keep_their_schemes(tiny_model, windows):
    coverage = planned(tiny_model, "w4a4")
    before, total = logits(tiny_model, windows), sum(p.numel() for p in tiny_model.parameters())
    tensors = peers.unfuse_experts(tiny_model, coverage.tensors)
    torch.testing.assert_close(logits(tiny_model, windows), before, rtol=0, atol=1e-6)
    parameters = dict(tiny_model.named_parameters())
    assert set(tensors) == set(parameters) and sum(p.numel() for p in parameters.values()) == total
    quantised = sum(p.numel() for name, p in parameters.items() if tensors[name] is not None)
    assert quantised == round(coverage.quantized_share * total)


def test_autoround_gets_the_plan_of_every_linear_and_expert(tiny_model):
    config = peers._layer_config(tiny_model, planned(tiny_model, "w4a4").tensors)
    assert config["lm_head"] == {"bits": 16, "act_bits": 16}
    assert config["model.layers.1.self_attn.o_proj"]["act_bits"] == 4
    for e in range(8):
        leaves = [config[f"model.layers.2.mlp.experts.{e}.{leaf}_proj"] for leaf in ("gate", "up", "down")]
        assert [c["act_bits"] for c in leaves] == [4, 4, 8] and all(c["bits"] == 4 for c in leaves)
    assert (
        "act_bits"
        not in peers._layer_config(tiny_model, planned(tiny_model, "w2a16_g32").tensors)["model.layers.0.mlp.up_proj"]
    )


def test_a_missing_library_names_the_extra(tiny_model, windows, monkeypatch):
    tensors = planned(tiny_model, "w4a16_g32").tensors
    for module in ("torchao.quantization", "auto_round"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"torchao is not installed.*qdeepseek\[peers\]"):
        peers.torchao_prepare(tiny_model, tensors)
    with pytest.raises(ImportError, match=r"auto-round is not installed.*qdeepseek\[peers\]"):
        peers.autoround_weights(tiny_model, windows, tensors, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["w4a16_g32", "w4a16_g128", "w4a8", "w4a4", "w3a16_g32", "w2a16_g32"])
def test_torchao_skips_fused_experts_and_converts_exactly(tiny_model, windows, name):
    pytest.importorskip("torchao")
    coverage = planned(tiny_model, name)
    for unfuse in (False, True):
        model = copy.deepcopy(tiny_model)
        tensors = peers.unfuse_experts(model, coverage.tensors) if unfuse else coverage.tensors
        model, share = peers.torchao_prepare(model, tensors)
        trained = logits(model, windows)
        assert not torch.equal(trained, logits(tiny_model, windows))
        assert torch.equal(logits(peers.torchao_convert(model, tensors), windows), trained)
        assert (share == coverage.quantized_share) if unfuse else (share < 0.5 * coverage.quantized_share)


@pytest.mark.slow
def test_autoround_covers_the_plan_twice_in_one_process(tiny_model, windows):
    pytest.importorskip("auto_round")
    before = {name: p.detach().clone() for name, p in tiny_model.named_parameters()}
    state = torch.get_rng_state()
    for name, levels in (("w4a16_g32", 16), ("w2a16_g32", 4)):
        coverage = planned(tiny_model, name)
        result = peers.autoround_weights(tiny_model, windows, coverage.tensors, seed=0, iters=2, batch_size=2)
        assert result.share == coverage.quantized_share
        assert set(result.weights) == set(before)
        for key, scheme in coverage.tensors.items():
            if scheme is None:
                assert torch.equal(result.weights[key], before[key]), key
            else:
                groups = result.weights[key].reshape(-1, 32)
                assert max(len(g.unique()) for g in groups[:64]) <= levels, key
        plain = copy.deepcopy(tiny_model)
        plain.load_state_dict(result.weights, strict=False)
        torch.testing.assert_close(logits(plain, windows), logits(result.model, windows), rtol=0, atol=1e-5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, before[name]) for name, p in tiny_model.named_parameters())
