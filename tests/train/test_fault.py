"""The first non-finite number is found where it was made: in a weight, a forward, a backward, or between modules."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qdeepseek.layers import QuantLinear, WeightQuantizer
from qdeepseek.quant import QuantScheme, RangeMethod
from qdeepseek.train.fault import Fault, find_fault, nonfinite_tensor


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


class Attention(nn.Module):
    """q, k and v read one tensor; `broken` names the place that fails."""

    def __init__(self, broken):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.broken = broken

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.broken == "backward of k":
            k = NanBackward.apply(k)
        mixed = q * k + v
        if self.broken == "between":
            mixed = mixed / 0
        return self.o(mixed)


class Net(nn.Module):
    def __init__(self, broken="", recompute=False):
        super().__init__()
        self.embed, self.block, self.recompute = nn.Linear(4, 4), Attention(broken), recompute
        self.norm = nn.LayerNorm(4)

    def loss(self, x):
        x = self.embed(x)
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return self.norm(x).square().sum() + x.sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_finite_is_none_and_gradients_stay_alone(recompute):
    net = Net(recompute=recompute)
    net.loss(torch.randn(3, 4)).backward()
    before = [p.grad.clone() for p in net.parameters()]
    assert find_fault(net, lambda: net.loss(torch.randn(3, 4))) is None
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("recompute", [False, True])
def test_made_between_modules_is_the_parents(recompute):
    net = Net("between", recompute)
    assert find_fault(net, lambda: net.loss(torch.randn(3, 4))) == Fault("block", "forward", "input of block.o")
    net = Net("backward of k", recompute)
    fault = find_fault(net, lambda: net.loss(torch.randn(3, 4)))
    assert fault == Fault("block", "backward", "gradient of the output of block.k")


@pytest.mark.parametrize("name", ["block.q", "block.k", "block.v", "block.o", "norm"])
def test_a_module_that_fails_is_named_in_forward_and_backward(name):
    net = Net()
    net.get_submodule(name).register_forward_hook(lambda module, args, output: output * torch.inf)
    assert find_fault(net, lambda: net.loss(torch.randn(3, 4))) == Fault(name, "forward", "its output")
    net = Net()
    module = net.get_submodule(name)
    inner = module.forward
    module.forward = lambda x: inner(NanBackward.apply(x))
    fault = find_fault(net, lambda: net.loss(torch.randn(3, 4)))
    assert fault is not None and (fault.module, fault.where) == (name, "backward")


def test_a_parameters_gradient_alone():
    net = Net()
    net.norm.weight.register_hook(lambda grad: grad * torch.inf)  # as an overflow of its sum over tokens would be
    assert find_fault(net, lambda: net.loss(torch.randn(3, 4))) == Fault("norm", "backward", "gradient of norm.weight")


def test_a_loss_of_finite_modules():
    net = Net()
    assert find_fault(net, lambda: net.loss(torch.randn(3, 4)) / 0) == Fault("", "forward", "loss")


def test_weights_and_what_belongs_to_a_quantiser():
    scheme = QuantScheme(bits=4, granularity="per_channel", group_size=None)
    quantizer = WeightQuantizer(scheme, RangeMethod(learned=True), (4, 4))
    net = nn.Sequential(nn.Linear(4, 4), QuantLinear.from_linear(nn.Linear(4, 4), quantizer))
    assert nonfinite_tensor(net) == Fault("1", "weight", "1.weight_quantizer.scale")  # not initialised: NaN
    quantizer.initialize(net[1].weight)
    assert nonfinite_tensor(net) is None
    quantizer.register_forward_hook(lambda module, args, w_hat: w_hat * torch.nan)
    assert find_fault(net, lambda: net(torch.randn(2, 4)).sum()) == Fault("1", "forward", "its output")
