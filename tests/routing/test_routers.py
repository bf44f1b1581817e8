"""Routers of four families: found, tapped, and their probabilities those by which they weight their experts."""

import pytest
import torch
import transformers

from qdeepseek.routing.routers import find_routers, layer_number, log_probabilities
from qdeepseek.routing.tap import RouterTap

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 32,
}  # fmt: skip
MLA = {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
FAMILIES = {
    "DeepseekV3": MLA,
    "DeepseekV2": MLA,
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 8},
}


def family_model(family):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_are_the_weights_of_the_chosen_experts_up_to_a_factor(family):
    model = family_model(family)
    routers = find_routers(model)
    assert [layer_number(name) for name in routers] == ([1] if family.startswith("Deepseek") else [0, 1])
    for router in routers.values():
        torch.nn.init.normal_(router.weight)
        logits, weights, indices = router(torch.randn(20, 16))
        log_p = log_probabilities(router, logits)
        torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(20))
        ratio = weights.float().log() - log_p.gather(1, indices)
        torch.testing.assert_close(ratio[:, 0], ratio[:, 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_tap_sees_one_forward_and_its_gradient(family):
    model, rows = family_model(family).train(), []
    tap = RouterTap(find_routers(model), lambda row, logits: rows.append(row))
    ids = torch.arange(8)[None]
    with tap.record():
        model(ids)
    assert rows == list(range(len(tap.routers))) == list(tap.outputs)
    logits, indices = tap.outputs[0]
    assert logits.shape == (8, 4) and indices.shape == (8, 2) and logits.requires_grad
    model(ids)
    assert len(rows) == len(tap.routers)  # not recording
    tap.remove()
    with tap.record():
        model(ids)
    assert not tap.outputs


def test_a_score_function_of_the_router_itself_is_used():
    router = torch.nn.Module()
    router.score_fn = lambda z: torch.nn.functional.softplus(z).sqrt()
    z = torch.randn(5, 4, dtype=torch.float64)
    scores = router.score_fn(z)
    torch.testing.assert_close(log_probabilities(router, z).exp(), scores / scores.sum(-1, keepdim=True))


def test_a_forward_without_gradients_is_refused():
    model = family_model("Mixtral")
    tap = RouterTap(find_routers(model), lambda row, logits: None)
    with torch.no_grad(), tap.record(), pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(torch.arange(8)[None])


def test_routers_of_different_sizes_and_names_without_a_layer_are_errors():
    model = family_model("Mixtral")
    model.model.layers[0].mlp.gate.num_experts = 8
    with pytest.raises(ValueError, match="differ in their number of experts"):
        find_routers(model)
    with pytest.raises(ValueError, match=r"lies in no `layers.N`"):
        layer_number("mlp.gate")
