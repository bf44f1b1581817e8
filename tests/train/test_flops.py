"""FLOPs of a token against PyTorch's own counter in a real forward and backward, and against counting by hand."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from qdeepseek.surgery import Recipe, prepare
from qdeepseek.train import flops
from tests.train.test_config import composed

TOKENS = 24


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def deepseek(tiny_config):
    from transformers import DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = copy.deepcopy(tiny_config)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    return DeepseekV3ForCausalLM(config)


def counted(model, backward):
    ids = torch.arange(TOKENS)[None] % 90
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()  # every matrix has an input gradient
    with FlopCounterMode(display=False) as counter:
        logits = model(inputs_embeds=embedded, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_pass_costs_what_the_counter_counts(kind, backward, tiny_config):
    model = llama() if kind == "llama" else deepseek(tiny_config)
    model.get_input_embeddings().weight.requires_grad_(False)
    one = flops.training_flops(model) if backward else flops.forward_flops(model)
    eager_keys = TOKENS * TOKENS  # eager attention computes the half behind the mask too
    assert counted(model, backward) == one.of(TOKENS, eager_keys)


def test_by_hand(tiny_config):
    """The shipped model's shapes, factor by factor."""
    model = deepseek(tiny_config)
    attention = 128 * 128 + 128 * 2 * 64 + 128 * (128 + 32) + 128 * 2 * (32 + 64) + 2 * 64 * 128
    dense, expert, router = 3 * 128 * 256, 3 * 128 * 128, 8 * 128
    active = 3 * attention + dense + 2 * (router + (2 + 1) * expert) + 128 * 288
    assert flops.active_parameters(model) == (active, active)
    assert flops.training_flops(model) == flops.TokenFlops(6 * active, 3 * 2 * 3 * 2 * (64 + 64))
    assert flops.forward_flops(model) + flops.forward_flops(model) == flops.TokenFlops(4 * active, 4 * 3 * 2 * 128)


def test_frozen_weights_have_no_weight_gradient_and_scales_cost_nothing(tiny_config):
    model = deepseek(tiny_config)
    plain = flops.active_parameters(model)
    prepare(model, Recipe.from_config(composed("run_dir=x")["quant"]))
    assert flops.active_parameters(model) == plain
    model.requires_grad_(False)
    assert flops.training_flops(model).weights == 4 * plain[0]


def test_a_tied_head_counts_once():
    model = llama()
    apart = flops.active_parameters(model)[0]
    model.lm_head.weight = model.get_input_embeddings().weight
    assert flops.active_parameters(model)[0] == apart


def test_keys_of_packed_padded_and_plain_rows():
    ids = torch.zeros(2, 5, dtype=torch.long)
    labels = torch.full((2, 5), 1)
    labels[0, 3:] = -100
    packed = {"input_ids": ids, "labels": labels, "position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])}
    naive = [1 + 2 + 3, 1 + 2 + 1 + 2 + 3]  # the last document of row 0 trains nothing: padding
    assert flops.tokens_and_keys(packed).tolist() == [3 + 5, sum(naive)]
    padded = {"input_ids": ids, "labels": labels, "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])}
    assert flops.tokens_and_keys(padded).tolist() == [3 + 4, (1 + 2 + 3) + (1 + 2 + 3 + 4)]
    assert flops.tokens_and_keys({"input_ids": ids, "labels": labels}).tolist() == [10, 2 * 15]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A10", 125e12), ("NVIDIA A10G", None), ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX A4000", None), ("NVIDIA GB200", 2500e12), ("NVIDIA GeForce RTX 4090", 165e12),
    ],
)  # fmt: skip
def test_peak_by_name(name, peak):
    assert flops.peak_of(name) == peak


def test_a_cpu_has_no_peak():
    assert flops.peak_flops(torch.device("cpu")) is None
