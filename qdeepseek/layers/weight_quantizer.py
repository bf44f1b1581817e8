"""A weight's quantiser: owns or finds the scale, fake-quantises in the forward, gives the exporter the codes.

    w_hat = (codes - z) * s,   forward(w) == dequantize(*quantize(w)) bit for bit, in every dtype.

Where s comes from:
    minmax                    from w in each forward; no state
    percentile | iqr | mse    from clip_ratio * min-max of w; the buffer clip_ratio is set once by `initialize`
    learned (LSQ)             fp32 parameter `scale`; NaN until `initialize`, so that forgetting it is not silent
    set_scale (GPTQ, ...)     buffer `scale`, fixed
    level int8                from w by min-max, whatever of the above; bf16: there are no codes (level.py)

The cache keeps w_hat while the weight is unchanged, which saves the work under gradient accumulation and in the
recomputation of gradient checkpointing.  Unchanged means: same tensor, storage, dtype and version counter, the same
of the scale, the same level, and no optimiser step in the process since.  The last is needed because fused optimisers
(`AdamW(fused=True)`) and those that write through `.data` (ZeRO) do not move the version counter.  A write through
`.data` outside of an optimiser step must be followed by `clear_cache()`.

Deferred, a learned scale gets its gradient once an optimiser step instead of once a micro-batch: w and s stand still
during an accumulation and the straight-through dL/dw is dL/dw_hat, so that dL/ds follows from the accumulated w.grad.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qdeepseek.layers.level import Levelled, scheme_at
from qdeepseek.quant import QuantScheme, RangeMethod, fake_quantize_weight, find_range, grid
from qdeepseek.quant.fake_quantize import fake_quantize_served, straight_through
from qdeepseek.quant.lsq import gradients
from qdeepseek.quant.ranges import clip_ratio

MINMAX = RangeMethod()

_optimizer_steps = [0]  # taken in this process by any optimiser; part of the cache's key


def _count_step(*_: Any) -> None:
    _optimizer_steps[0] += 1


register_optimizer_step_post_hook(_count_step)


class _Memo(NamedTuple):
    """One cached w_hat, and the scale (the parameter itself if learned) and zero point it was made with."""

    weight: "weakref.ref[Tensor]"
    key: tuple[Any, ...]
    w_hat: Tensor
    scale: Tensor
    zero: Tensor | None


class WeightQuantizer(Levelled):
    """Fake-quantises weights of one shape (O, I) or (E, O, I).

    `scheme` is the target; at another level the forward uses `scheme_at(scheme, level)`, see level.py.

    row_blocks: parts of the rows that never share a per_tensor scale; 2 for a fused gate_up_proj.
    Raises ValueError (from `scheme.check_shape`) when the shape does not fit the scheme.
    """

    scale: Tensor | None
    zero: Tensor | None
    clip_ratio: Tensor | None
    clip_ratio_low: Tensor | None

    def __init__(
        self,
        scheme: QuantScheme,
        method: RangeMethod,
        shape: Sequence[int],
        *,
        row_blocks: int = 1,
        device: torch.device | str | None = None,
        name: str = "weight",
    ) -> None:
        super().__init__()
        scheme.check_shape(shape, name)
        if shape[-2] % row_blocks:
            raise ValueError(
                f"{name}: {shape[-2]} rows do not split into {row_blocks} blocks; give a divisor of the rows"
            )
        self.scheme, self.method = scheme, method
        self.scale_shape = scheme.scale_shape(shape, row_blocks)
        self.enabled = True
        self.cache = False  # keep w_hat from forward to forward
        self.recompute = False  # do not keep w_hat even from forward to backward, see `rematerialise`
        self.defer = False  # the scale's gradient comes from `set_scale_grad`, not from the backward
        self._memo: _Memo | None = None
        searched = method.kind != "minmax" and not method.learned
        ratio = torch.ones(self.scale_shape, device=device) if searched else None
        self.register_buffer("clip_ratio", ratio)
        self.register_buffer("clip_ratio_low", None if ratio is None or scheme.symmetric else ratio.clone())
        if method.learned:
            self.scale = nn.Parameter(torch.full(self.scale_shape, torch.nan, device=device))
            zero = None if scheme.symmetric else torch.zeros(self.scale_shape, dtype=torch.int8, device=device)
            self.register_buffer("zero", zero)
        else:
            self.register_buffer("scale", None)
            self.register_buffer("zero", None)

    def extra_repr(self) -> str:
        grid_name = self.scheme.grid if self.scheme.symmetric else "asymmetric"
        group = f" {self.scheme.group_size}" if self.scheme.group_size else ""
        kind = "learned" if self.method.learned else "fixed" if self.scale is not None else self.method.kind
        raised = "" if self.level == "target" else f", level={self.level}"
        text = f"int{self.scheme.bits} {self.scheme.granularity}{group} {grid_name}, {kind}, enabled={self.enabled}"
        return text + raised

    @torch.no_grad()
    def initialize(self, w: Tensor) -> None:
        """Set the learned scale (and zero point) or the clip ratio from w, in place; a fixed scale stays."""
        if self.method.learned:
            assert self.scale is not None
            lo, hi = find_range(w, self.scheme, self.method, self.scale_shape)
            scale, zero = grid.scale_from_range(lo, hi, self.scheme, w.dtype)
            self.scale.copy_(scale)
            if self.zero is not None and zero is not None:
                self.zero.copy_(zero)
        elif self.clip_ratio is not None:
            ratio = clip_ratio(w, self.scheme, self.method, self.scale_shape)
            assert ratio is not None
            self.clip_ratio.copy_(ratio[1])
            if self.clip_ratio_low is not None:
                self.clip_ratio_low.copy_(ratio[0])

    @torch.no_grad()
    def set_scale(self, scale: Tensor, zero: Tensor | None = None) -> None:
        """Use this scale (.., O, G) and zero point from now on: those that a PTQ method found.

        Codes of a weight dequantised with them are then exactly the codes it was dequantised from.  A learned
        scale takes the values and goes on learning; otherwise the scale becomes a fixed buffer.
        """
        if tuple(scale.shape) != self.scale_shape:
            raise ValueError(f"set_scale: shape {tuple(scale.shape)} is not the scale shape {self.scale_shape}")
        if (zero is None) != self.scheme.symmetric:
            raise ValueError("set_scale: an asymmetric scheme wants a zero point, a symmetric one wants none")
        if self.method.learned:
            assert self.scale is not None
            self.scale.copy_(scale)
        else:
            self.scale = scale.detach().to(torch.float32, copy=True)
        self.zero = None if zero is None else zero.detach().to(torch.int8, copy=True)
        self.clear_cache()

    def forward(self, w: Tensor) -> Tensor:
        if not self.enabled:
            return w
        if self.level != "target":
            return self._raised(w)
        memo = self._recall(w)
        if memo is None:
            (scale, zero), cached = self._scale_and_zero(w), None
        else:
            scale, zero, cached = memo.scale, memo.zero, memo.w_hat
        if memo is None and self.defers(w):
            scale = grid.round_scale(scale.detach(), self.scheme, w.dtype)
        learned = self.method.learned and not self.defers(w)
        fake_quantize = fake_quantize_weight if learned else fake_quantize_served
        w_hat = fake_quantize(w, self.scheme, self.method, scale, zero, cached)
        if memo is None and self._cacheable(w):
            self._memo = _Memo(weakref.ref(w), self.key(w), w_hat.detach(), scale, zero)
        return w_hat

    def _raised(self, w: Tensor) -> Tensor:
        """w_hat above the target: straight-through; a learned scale waits, with a gradient of zero."""
        memo = self._recall(w)
        w_hat = memo.w_hat if memo is not None else self._round_raised(w)
        if memo is None and self._cacheable(w):
            self._memo = _Memo(weakref.ref(w), self.key(w), w_hat, w_hat, None)
        return straight_through(w, w_hat, self.scale if self.method.learned and not self.defers(w) else None)

    @torch.no_grad()
    def _round_raised(self, w: Tensor) -> Tensor:
        scheme = scheme_at(self.scheme, self.level)
        if scheme is None:
            serve = self.scheme.torch_serve_dtype
            return w.detach() if serve is None else w.to(serve).to(w.dtype)
        return grid.fake_quantize(w, *self._min_max(w, scheme), scheme)

    def _min_max(self, w: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor | None]:
        return grid.scale_from_range(*find_range(w, scheme, MINMAX, self.scale_shape), scheme, w.dtype)

    @torch.no_grad()
    def quantize(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes int8 like w, scale in scale_dtype (.., O, G), zero int8 or None): what the forward uses.

        Raises ValueError at level bf16, where the forward uses no codes.
        """
        if self.level != "target":
            scheme = scheme_at(self.scheme, self.level)
            if scheme is None:
                raise ValueError("level bf16 has no codes; set level to target or int8 before quantize")
            scale, zero = self._min_max(w, scheme)
            return grid.quantize(w, scale, zero, scheme), scale.to(scheme.torch_scale_dtype), zero
        scale, zero = self.served_scale(w)
        return grid.quantize(w, scale, zero, self.scheme), scale.to(self.scheme.torch_scale_dtype), zero

    @torch.no_grad()
    def served_scale(self, w: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale as served (.., O, G), in the compute dtype of w, and zero point: the target's, at any level."""
        scale, zero = self._scale_and_zero(w)
        return (grid.round_scale(scale, self.scheme, w.dtype) if self.method.learned else scale), zero

    def defers(self, w: Tensor) -> bool:
        """Whether the forward of w leaves the scale's gradient to `set_scale_grad`."""
        if not self.defer or not self.method.learned or self.method.gradient != "ste":
            return False
        return isinstance(w, nn.Parameter) and w.requires_grad

    @torch.no_grad()
    def set_scale_grad(self, w: Tensor) -> None:
        """Set the scale's gradient from w.grad, accumulated and reduced over ranks; call before clipping and step.

        Above the target the scale is not used, and its gradient is zero.
        """
        if not self.enabled or w.grad is None or not self.defers(w):
            return
        assert self.scale is not None
        if self.level != "target":
            self.scale.grad = torch.zeros_like(self.scale)
            return
        self.scale.grad, _ = gradients(w, self.scale, self.zero, self.scheme, w.grad)

    def clear_cache(self) -> None:
        """Forget the cached w_hat. Needed after a write through `weight.data` outside of an optimiser step."""
        self._memo = None

    def _scale_and_zero(self, w: Tensor) -> tuple[Tensor, Tensor | None]:
        """The learned parameter, or the scale as served; and the zero point."""
        if self.scale is None:
            ratio = None
            if self.clip_ratio is not None:
                low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
                ratio = (low, self.clip_ratio)
            with torch.no_grad():
                lo, hi = find_range(w, self.scheme, MINMAX, self.scale_shape, ratio)
                return grid.scale_from_range(lo, hi, self.scheme, w.dtype)
        moved = self.scale.device != w.device and not self.method.learned and not w.is_meta
        if moved:  # a fixed scale that was loaded or set before the model went to its device
            self.scale = self.scale.to(w.device)
            self.zero = None if self.zero is None else self.zero.to(w.device)
        if self.method.learned:
            return self.scale, self.zero
        return grid.round_scale(self.scale, self.scheme, w.dtype), self.zero

    def key(self, w: Tensor) -> tuple[Any, ...]:
        """Equal as long as the forward of w gives the same w_hat."""
        own = [t for t in (self.scale, self.zero, self.clip_ratio, self.clip_ratio_low) if t is not None]
        kind = (w.dtype, self.defers(w), self.level)
        return (_optimizer_steps[0], w._version, w.data_ptr(), *kind, *((t._version, t.data_ptr()) for t in own))

    def _cacheable(self, w: Tensor) -> bool:
        """Parameters only: a parametrised weight (LoRA) is another tensor in each forward."""
        if not self.cache or torch.is_inference_mode_enabled() or w.is_inference():
            return False
        return isinstance(w, nn.Parameter)

    def _recall(self, w: Tensor) -> _Memo | None:
        memo = self._memo
        if memo is None:
            return None
        if self.cache and memo.weight() is w and memo.key == self.key(w):
            return memo
        self._memo = None
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WeightQuantizer":
        """Move, but keep dtypes: `model.bfloat16()` must not round an fp32 learned scale."""
        self.clear_cache()

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memo": None}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A fixed scale (see `set_scale`) exists only in the checkpoint: make room for it first."""
        for key in ("scale", "zero"):
            saved = state_dict.get(prefix + key)
            if saved is not None and getattr(self, key) is None:
                setattr(self, key, torch.empty_like(saved))
        self.clear_cache()
        super()._load_from_state_dict(state_dict, prefix, *args)
