"""Fake-quant of what a KV cache would hold, in the two places where it passes.

    MLA     latent c = kv_a_layernorm(·) (B, T, R): a hook at the norm's output, before cache and kv_b_proj
            rope key k_R (B, 1, T, P), rotated: it is the end of every head's key when attention begins
    others  keys, rotated, and values (B, H, T, D): when attention begins, on what a cache returned

The latent is quantised before it is cached. Where a cache is read instead, every token is quantised alone and always to
the same x_hat, so quantising on reading is quantising on writing. No parameters, no state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qdeepseek.quant.kv_cache import CacheFormat, fake_quantize_cache


class CacheQuantizer(nn.Module):
    """x (.., D) -> x_hat, same shape and dtype: each vector as it comes out of a cache of `format`.

    While `observe` is set, `error` holds [Σ(x_hat − x)², Σx²] of the latest forward, on its device.
    """

    def __init__(self, form: CacheFormat) -> None:
        super().__init__()
        self.form = form
        self.enabled = True
        self.observe = False
        self.error: Tensor | None = None

    def extra_repr(self) -> str:
        return f"{self.form.label}, enabled={self.enabled}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return x
        x_hat = fake_quantize_cache(x, self.form)
        if self.observe:
            with torch.no_grad():
                self.error = torch.stack([(x_hat - x).float().square().sum(), x.float().square().sum()])
        return x_hat


class KeyValueQuantizer(nn.Module):
    """Keys and values (B, H, T, D), a scale for each token and head, or for groups of it."""

    def __init__(self, form: CacheFormat) -> None:
        super().__init__()
        self.key, self.value = CacheQuantizer(form), CacheQuantizer(form)

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.key(key), self.value(value)


class RopeQuantizer(nn.Module):
    """The last `width` elements of an MLA key (B, H, T, ·), one tensor that was expanded over the heads."""

    def __init__(self, form: CacheFormat, width: int) -> None:
        super().__init__()
        self.width = width
        self.rope = CacheQuantizer(form)

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        nope, rope = key.split([key.shape[-1] - self.width, self.width], dim=-1)
        rope = self.rope(rope[:, :1]).expand(-1, key.shape[1], -1, -1)
        return torch.cat((nope, rope), dim=-1), value


def quantize_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook of a norm that has a `cache_quantizer`."""
    return module.cache_quantizer(output)  # type: ignore[operator]


def with_quantized_cache(attention: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function of transformers' interface that sends keys and values through `module.cache_quantizer`."""

    def forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        quantizer = getattr(module, "cache_quantizer", None)
        if quantizer is not None:
            key, value = quantizer(key, value)
        return attention(module, query, key, value, *args, **kwargs)

    return forward
