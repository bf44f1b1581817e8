"""The rules as one would write them for one tensor (L, C) or sequence batch (B, L, C), in float64, with branches."""

import math

import torch

ALPHA = {"embedding": 0.15, "down": 0.08, "up": 0.12}


def seed(point, g, norm=3.2, variance=0.01):
    """(gradient, fired, mean factor)"""
    if point == "down" and not float(g.norm()) > norm:
        return g, 0.0, 1.0
    if point == "up" and not float(g.var(correction=0)) < variance:
        return g, 0.0, 1.0
    factor = 1 + ALPHA[point] * torch.tanh(g.mean(-2, keepdim=True))
    return g * factor, 1.0, float(factor.mean())


def relative(point, g, usual, ratio=1.1):
    """usual: None or (rms, variance); (gradient, fired, mean factor)"""
    rms, variance = math.sqrt(float(g.square().mean())), float(g.var(correction=0))
    if point == "down" and (usual is None or not rms > ratio * usual[0]):
        return g, 0.0, 1.0
    if point == "up" and (usual is None or not variance < usual[1] / ratio):
        return g, 0.0, 1.0
    mean = g.mean(-2, keepdim=True)
    factor = 1 + ALPHA[point] * torch.tanh(mean / mean.square().mean(-1, keepdim=True).sqrt())
    return g * factor, 1.0, float(factor.mean())


def row(point, g, width=None):
    """(gradient, share of rows that grew, mean factor)"""
    flat = g.reshape(-1, width or g.shape[-1])
    rms = flat.square().mean(-1, keepdim=True).sqrt()
    tanh = torch.tanh(torch.log(rms / g.square().mean().sqrt()))
    out = flat * (1 + ALPHA[point] * tanh)
    length = float(g.norm() / out.norm())
    factor = length * (1 + ALPHA[point] * tanh)
    return (out * length).view(g.shape), float((tanh > 0).double().mean()), float(factor.mean())


def per_expert(rule, point, g, expert, experts, usual=None):
    """One expert after another. -> (gradient, fired (E,), factor (E,)) of experts with rows."""
    out, fired, factor = g.clone(), {}, {}
    for e in range(experts):
        rows = (expert == e).nonzero().flatten()
        if len(rows):
            extra = {} if usual is None else {"usual": usual[e]}
            out[rows], fired[e], factor[e] = rule(point, g[rows], **extra)
    return out, fired, factor
