"""Parameter groups and learning-rate schedule.

Three groups: matrices (weight decay), vectors (norms, biases: none), learned quantisation scales (none, own
learning rate). Scales are recognised by the module that owns them, not by their name.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qdeepseek.layers import WeightQuantizer
from qdeepseek.train.config import OptimConfig


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups for AdamW, empty ones left out; every trainable parameter is in exactly one."""
    scales = {id(p) for m in model.modules() if isinstance(m, WeightQuantizer) for p in m.parameters(recurse=False)}
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    learned: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in scales:
            learned.append(parameter)
        else:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # under ZeRO-3 it is empty here
            (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups = [
        {"name": "matrices", "params": matrices, "lr": config.lr, "weight_decay": config.weight_decay},
        {"name": "vectors", "params": vectors, "lr": config.lr, "weight_decay": 0.0},
        {"name": "scales", "params": learned, "lr": config.scale_lr, "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def lr_factor(config: OptimConfig, steps: int) -> Callable[[int], float]:
    """Factor on the peak learning rate at optimizer step s of `steps`: linear warm-up, then the schedule."""
    warmup, low = config.warmup_steps, config.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        t = min(1.0, (step - warmup) / max(1, steps - warmup))
        if config.schedule == "constant":
            return 1.0
        if config.schedule == "cosine":
            return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * t))
        decay = 1.0 if config.schedule == "linear" else config.decay_fraction
        return low + (1 - low) * min(1.0, (1 - t) / decay)

    return factor


def build_optimizer(model: nn.Module, config: OptimConfig, steps: int, fused: bool = True) -> dict[str, Any]:
    """Lightning's optimizer dictionary: AdamW and a per-step LambdaLR."""
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config), lr=config.lr, betas=config.betas, eps=1e-8, fused=fused
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(config, steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
