"""A restored state goes on exactly as the kept one did, also where the optimizer had no moments yet."""

import torch
from torch import nn

from qdeepseek.train.good_state import copy_state, restore_


def step(net, optimizer, seed):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()


def test_restored_goes_on_as_kept():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    for before in (0, 2):
        for seed in range(before):
            step(net, optimizer, seed)
        kept = copy_state(net, optimizer, before)
        step(net, optimizer, 7)
        expected = copy_state(net, optimizer, before + 1)
        for seed in range(3):
            step(net, optimizer, seed)
        restore_(kept, net, optimizer, broadcast=False)
        step(net, optimizer, 7)
        found = copy_state(net, optimizer, before + 1)
        assert all(torch.equal(expected.tensors[k], found.tensors[k]) for k in expected.tensors)
        for a, b in zip(expected.moments, found.moments, strict=True):
            assert all(torch.equal(a[k], b[k]) for k in a)
