"""Gradients of activations, changed in the backward by a rule of qdeepseek/compensate at the points of
compensation_points.py; what is common to seed, relative and row.

Everything in the backward stays on the device. Each rank decides by the gradient of its own micro-batch; DDP then
averages gradients of weights as always, so weights stay equal. What a rule remembers (`usual`, see history.py) is
updated once an optimizer step from all micro-batches and, in one all_reduce, all ranks; it is equal on every rank
and in the checkpoint. Logged a point, of rank 0, over the steps since the last entry:
    compensation/<module>/fired    share of backward calls (and experts that had tokens) in which the condition held
    compensation/<module>/factor   mean factor
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from qdeepseek.compensate.history import observe_, update_
from qdeepseek.compensate.tokens import Compensated, Tokens
from qdeepseek.layers import whole_name
from qdeepseek.routing.ranks import sum_over_ranks
from qdeepseek.surgery import is_fused_experts, plan
from qdeepseek.train.callbacks.compensation_points import Point, find_points, place_hooks
from qdeepseek.train.config import ConfigError


class Rule(Protocol):
    """A rule of qdeepseek/compensate; `statistics` is the number of columns of `usual` that it observes."""

    statistics: int

    def __call__(self, point: str, g: Tensor, tokens: Tokens, usual: Tensor) -> Compensated: ...


class GradientCompensation(Callback):
    """Applies `rule` at every point during a fit. decay: of `usual`, an optimizer step."""

    def __init__(self, rule: Rule, log_every: int = 50, decay: float = 0.95):
        if not 0 <= decay < 1 or log_every < 1:
            raise ValueError(f"decay {decay} must lie in [0, 1) and log_every {log_every} be at least 1")
        self.rule, self.log_every, self.decay = rule, log_every, decay
        self.points: list[Point] = []
        self._rows: list[slice] = []
        self._remove: list[Callable[[], Any]] = []
        self._saved: Tensor | None = None
        self._step = 0
        self._counting = False
        self.usual = self._observed = self._counts = torch.empty(0)

    def check(self, run: Any, model: torch.nn.Module) -> None:
        """Raises ConfigError for fused experts that stay unquantised: no hook reaches into them."""
        tensors = plan(model, run.recipe).tensors
        for name, module in model.named_modules():
            if is_fused_experts(module) and tensors.get(f"{whole_name(name)}.down_proj") is None:
                raise ConfigError(
                    f"method.compensation: recipe {run.recipe.name} leaves {name} unquantised, and gradients inside of "
                    f"fused experts are reached through quantisers; give it a scheme, or set method/compensation=off"
                )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.points = find_points(pl_module.model)  # type: ignore[arg-type]
        ends = torch.tensor([p.groups for p in self.points]).cumsum(0).tolist()
        self._rows = [slice(end - p.groups, end) for p, end in zip(self.points, ends, strict=True)]
        k, device = self.rule.statistics, pl_module.device
        self.usual = torch.full((ends[-1], k), torch.nan, device=device)
        self._observed = torch.zeros(ends[-1], k + 1, device=device)
        self._counts = torch.zeros(ends[-1], 3, device=device)  # groups with rows, fired, sum of factors
        self._remove = list(place_hooks(self.points, self._compensate))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        if self._saved is not None:
            if self._saved.shape != self.usual.shape:
                raise ValueError(
                    f"compensation: the checkpoint has statistics of shape {tuple(self._saved.shape)}, this run of "
                    f"{tuple(self.usual.shape)}; resume with the same model and the same method.compensation"
                )
            self.usual.copy_(self._saved)
            self._saved = None

    @torch.no_grad()
    def _compensate(self, number: int, grad: Tensor, tokens: Tokens) -> Tensor:
        rows = self._rows[number]
        g = grad.to(torch.promote_types(grad.dtype, torch.float32))
        result = self.rule(self.points[number].kind, g, tokens, self.usual[rows])
        if not self._counting:  # a guard runs a failed step again
            return result.grad.to(grad.dtype)
        present = (tokens.rows(g) > 0).float()
        observe_(self._observed[rows], result.observed, present)
        self._counts[rows] += (
            torch.stack([torch.ones_like(present), result.fired, result.factor], -1) * present[:, None]
        )
        return result.grad.to(grad.dtype)

    def on_before_backward(self, *args: Any) -> None:
        self._counting = True

    def on_after_backward(self, *args: Any) -> None:
        self._counting = False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step = trainer.global_step
        if self.rule.statistics:
            update_(self.usual, sum_over_ranks(self._observed), self.decay)
            self._observed.zero_()
        if self._step % self.log_every == 0:
            self._log(pl_module)

    def _log(self, pl_module: L.LightningModule) -> None:
        named: dict[str, list[Tensor]] = defaultdict(list)
        for point, rows in zip(self.points, self._rows, strict=True):
            named[point.name].append(self._counts[rows].sum(0))
        for name, counts in named.items():
            present, fired, factor = torch.stack(counts).sum(0).unbind()
            pl_module.log(f"compensation/{name}/fired", fired / present.clamp_min(1))
            pl_module.log(f"compensation/{name}/factor", factor / present.clamp_min(1))
        self._counts.zero_()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        while self._remove:
            self._remove.pop()()

    def state_dict(self) -> dict[str, Any]:
        return {"usual": self.usual.cpu().clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["usual"]
