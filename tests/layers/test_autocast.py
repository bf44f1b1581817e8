"""Routed experts under autocast: bf16 products of w_hat found in fp32, as a loop of F.linear gives; fp32 gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config
from transformers.integrations import moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from qdeepseek.layers import (
    QuantLinear,
    WeightQuantizer,
    attach_expert_quantizers,
    naive_experts_forward,
    quant_experts_forward,
    tap_experts,
)
from qdeepseek.layers.autocast import as_autocast
from qdeepseek.quant import QuantScheme, RangeMethod

E, H, INTER, T, K = 4, 64, 32, 24, 2
FORWARDS = {
    "grouped": quant_experts_forward(moe.grouped_mm_experts_forward, "expert"),
    "batched": quant_experts_forward(moe.batched_mm_experts_forward, "token"),
    "eager": naive_experts_forward,
}
PRODUCTS = ("_grouped_mm", "bmm", "mm", "addmm")
LSQ = RangeMethod(learned=True)


class Watch(TorchDispatchMode):
    """Operand dtypes of matrix products, and the storages of casts of tensors of `numel` elements."""

    def __init__(self, numel=()):
        super().__init__()
        self.numel, self.operands, self.casts = numel, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in PRODUCTS:
            self.operands += [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        if name == "_to_copy" and out.numel() in self.numel:
            self.casts.append(out.untyped_storage()._weak_ref())
        return out


def autocast(enabled=True):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def quantizer(w, blocks=1, recompute=False):
    made = WeightQuantizer(QuantScheme(group_size=32), LSQ, w.shape, row_blocks=blocks)
    made.initialize(w)
    made.recompute = recompute
    return made


def make(quantised, recompute=False):
    torch.manual_seed(0)
    experts = DeepseekV3Experts(DeepseekV3Config(hidden_size=H, moe_intermediate_size=INTER, n_routed_experts=E))
    for p in experts.parameters():
        nn.init.normal_(p, std=0.2)
    if quantised:
        pair = quantizer(experts.gate_up_proj, 2, recompute), quantizer(experts.down_proj, 1, recompute)
        attach_expert_quantizers(experts, *pair)
    return experts


def loop(experts, x, index, weights):
    """Every expert as F.linear, whose operands autocast casts itself."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if hasattr(experts, "gate_up_proj_quantizer"):
        gate_up, down = experts.gate_up_proj_quantizer(gate_up), experts.down_proj_quantizer(down)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = (index == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[e]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[e]) * weights[token, slot, None]
        out = out.index_add(0, token, y.to(out.dtype))
    return out


def run(forward, experts, mixed, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=g).to(dtype).requires_grad_()
    weights, index = torch.randn(T, E, generator=g).softmax(-1).to(dtype).topk(K, -1)
    weights = weights.detach().requires_grad_()
    with autocast(mixed):
        y = forward(experts, x, index, weights)
    grad = torch.randn(T, H, generator=g).to(dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, weights, *experts.parameters()], grad)]


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_values_and_gradients_are_as_near_to_fp64_as_the_loop(name, quantised):
    exact = run(loop, make(quantised).double(), mixed=False, dtype=torch.float64)
    experts = make(quantised)
    rounded, got = run(loop, experts, mixed=True), run(FORWARDS[name], experts, mixed=True)
    for a, b, c in zip(got, rounded, exact, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - c).norm() <= 2 * (b - c).norm()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_products_take_bf16_in_both_directions_and_fp32_outside(name, quantised):
    for mixed, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with Watch() as watch:
            run(FORWARDS[name], make(quantised), mixed)
        assert len(watch.operands) >= 12 and set(watch.operands) == {dtype}


def test_taps_see_what_the_loop_would_give_them():
    experts, seen = make(True), []
    tap_experts(experts, gate_up=lambda rows, expert_S: (seen.append(rows.dtype), rows)[1])
    tapped = run(FORWARDS["grouped"], experts, mixed=True)
    tap_experts(experts)
    assert seen == [torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(tapped, run(FORWARDS["grouped"], experts, mixed=True), strict=True))


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_recompute_and_cache_change_no_bit(name, cache):
    plain, other = make(True), make(True, recompute=not cache)
    for part in (other.gate_up_proj_quantizer, other.down_proj_quantizer):
        part.cache = cache
    expected = run(FORWARDS[name], plain, mixed=True)
    for _ in range(2):
        for a, b in zip(run(FORWARDS[name], other, mixed=True), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["grouped", "batched", "linear"])  # the loop keeps w_hat in any case
def test_recompute_keeps_no_cast_of_w_hat(kind):
    x, weights = torch.randn(T, H, requires_grad=True), torch.full((T, K), 0.5)
    index = torch.arange(2 * T).view(T, K) % E
    for recompute in (True, False):
        if kind == "linear":
            plain = nn.Linear(H, 96, bias=False)
            module = QuantLinear.from_linear(plain, quantizer(plain.weight, recompute=recompute))
        else:
            module = make(True, recompute)
        numel = {p.numel() for n, p in module.named_parameters() if "quantizer" not in n}
        with Watch(numel) as watch, autocast():
            y = module(x) if kind == "linear" else FORWARDS[kind](module, x, index, weights)
        gone = [torch.UntypedStorage._expired(ref) for ref in watch.casts]
        if kind == "batched":  # its matmul saves the copy gathered for every row, which is not w_hat
            assert len(gone) == 2 and all(gone)
        else:
            assert gone == [recompute] * len(numel)
        y.sum().backward()


def test_casts_what_autocast_casts():
    x = torch.ones(2)
    assert as_autocast(x) is x
    with autocast():
        assert as_autocast(x).dtype == torch.bfloat16
        for same in (x.double(), x.long(), x.bfloat16(), x.to("meta")):
            assert as_autocast(same) is same
