"""Routers in quantisation-aware training: entropy loss, KL, bias update, temperature, frozen weights, statistics.

Each technique is a file of qdeepseek/routing; this one takes the routers' outputs from the forward of the training
step and applies them.

    forward     RouterTap records the student's and the teacher's routers; λ·entropy + KL join the loss once
    backward    the gradient of the router logits is limited
    step        one sum over ranks; bias and temperature move by it
    interval    statistics of all ranks' tokens -> loggers and history; `finish` writes routing.json

The bias, the temperature (in the router's weight) and the phase of λ (a function of the step) are in the checkpoint of
the model; this callback adds the sums of the unfinished interval, the history and log τ.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from qdeepseek.data.chat import IGNORE
from qdeepseek.data.packing import real_tokens
from qdeepseek.routing import statistics
from qdeepseek.routing.bias import update_bias_
from qdeepseek.routing.entropy import EntropyConfig, entropy_loss
from qdeepseek.routing.gradient import LimitConfig, limit_gradient
from qdeepseek.routing.kl import router_kl
from qdeepseek.routing.ranks import sum_over_ranks
from qdeepseek.routing.routers import find_routers, layer_number, log_probabilities
from qdeepseek.routing.tap import RouterTap
from qdeepseek.routing.temperature import TemperatureConfig, adapt, fold_
from qdeepseek.train.config import ConfigError, build
from qdeepseek.train.zero import gathered, refresh

Options = Mapping[str, Any] | None


class Routing(Callback):
    """The routing methods of one run; conf/method/routing has a file for each usual choice.

    Args:
        entropy: keys of EntropyConfig, or None.
        kl_weight: weight of Σ_layers KL(unquantised router ‖ router); needs the teacher.
        bias_speed: u of the loss-free bias update; 0 is off.
        entropy_and_bias: both balance the same load, and only this key lets them run together.
        frozen: router weights are not trained.
        gradient: keys of LimitConfig, or None.
        temperature: keys of TemperatureConfig, or None.
        log_every: optimizer steps of an interval of the statistics.
    """

    def __init__(
        self,
        entropy: Options = None,
        kl_weight: float = 0.0,
        bias_speed: float = 0.0,
        entropy_and_bias: bool = False,
        frozen: bool = False,
        gradient: Options = None,
        temperature: Options = None,
        log_every: int = 50,
    ):
        where = "method.routing"
        self.entropy = None if entropy is None else build(EntropyConfig, entropy, f"{where}.entropy")
        self.limit = None if gradient is None else build(LimitConfig, gradient, f"{where}.gradient")
        self.temperature = (
            None if temperature is None else build(TemperatureConfig, temperature, f"{where}.temperature")
        )
        self.kl_weight, self.bias_speed, self.frozen, self.log_every = kl_weight, bias_speed, frozen, log_every
        if kl_weight < 0 or bias_speed < 0 or log_every < 1:
            raise ConfigError(
                f"{where}: kl_weight {kl_weight} and bias_speed {bias_speed} must not be negative, "
                f"log_every {log_every} must be at least 1"
            )
        if self.entropy is not None and bias_speed and not entropy_and_bias:
            raise ConfigError(
                f"{where}: entropy and bias_speed {bias_speed} both balance the load; "
                f"choose one, or say entropy_and_bias=true"
            )
        if frozen and (self.entropy is not None or self.temperature is not None):
            raise ConfigError(f"{where}: frozen=true leaves entropy and temperature nothing to move; drop one of them")
        self.routers: dict[str, nn.Module] = {}
        self._taps: list[RouterTap] = []  # student, and teacher where there is one
        self._history: list[tuple[int, Tensor]] = []
        self._restored: dict[str, Any] = {}

    # ---- before the fit

    def check(self, run: Any, model: nn.Module) -> None:
        """Refuse what does not fit model or run, before anything is trained."""
        self._check(model)
        if self.kl_weight and not run.method.distill_weight:
            raise ConfigError(
                f"method.routing.kl_weight {self.kl_weight} compares with the teacher, which runs only for "
                f"method.distill_weight above 0; set that, or kl_weight=0"
            )
        if "lora" in run.methods and (self.entropy is not None or self.temperature is not None):
            raise ConfigError(
                "method.routing: entropy loss and temperature change router weights, which method.lora freezes; "
                "set method/routing=observe, bias or off, or method/lora=off"
            )
        if self.limit is not None and self.limit.max_norm is not None and run.trainer.precision == "16-mixed":
            raise ConfigError(
                "method.routing.gradient.max_norm measures gradients, which trainer.precision 16-mixed scales; "
                "use bf16-mixed, or max_norm=null"
            )

    def attach(self, run: Any, student: nn.Module) -> None:
        """Freeze router weights where asked."""
        if self.frozen:
            for router in find_routers(student).values():
                router.requires_grad_(False)

    def _check(self, model: nn.Module) -> None:
        try:
            routers = find_routers(model)
        except ValueError as error:
            raise ConfigError(f"method.routing: {error}") from error
        if not routers:
            raise ConfigError("method.routing: the model has no router; use method/routing=off")
        for name, router in routers.items():
            if self.bias_speed and not hasattr(router, "e_score_correction_bias"):
                raise ConfigError(
                    f"method.routing.bias_speed {self.bias_speed}: {name} ({type(router).__name__}) has no "
                    f"e_score_correction_bias; use method/routing=entropy"
                )
            if self.temperature is not None and getattr(router, "bias", None) is not None:
                raise ConfigError(f"method.routing.temperature: the logits of {name} have a bias, which does not scale")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model: Any = pl_module.model
        self._check(model)
        self.routers, device = find_routers(model), pl_module.device
        self._layers = [layer_number(name) for name in self.routers]
        self._taps = [RouterTap(self.routers, self._limit_logits)]
        teacher: Any = pl_module.teacher
        if teacher is not None:
            self._taps.append(RouterTap(find_routers(teacher)))
        first: Any = next(iter(self.routers.values()))
        self._experts, self._top_k = int(first.num_experts), int(first.top_k)
        self._interval = statistics.empty(len(self.routers), self._experts, device)
        self._step_sums, self._last = torch.zeros_like(self._interval), torch.zeros_like(self._interval)
        self._log_tau = torch.zeros(len(self.routers), device=device)
        self._count: Tensor | float = 1.0
        self._accumulate = trainer.accumulate_grad_batches
        self._restore(trainer.is_global_zero)
        pl_module.auxiliary["routing"] = self  # type: ignore[index, operator, assignment]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step, self._steps = trainer.global_step, trainer.max_steps  # restored only after on_fit_start
        self._trainer = trainer

    # ---- forward and backward

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record every router of student and teacher (qdeepseek/train/module.py)."""
        with ExitStack() as stack:
            for tap in self._taps:
                stack.enter_context(tap.record())
            yield

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Entropy and KL of the forward just recorded; its statistics are added to the step's."""
        real_T = real_tokens(batch).flatten()
        self._count = (batch["labels"][:, 1:] != IGNORE).sum() * self._accumulate
        student = self._taps[0].outputs
        teacher = self._taps[1].outputs if len(self._taps) > 1 else {}
        routers = list(self.routers.values())
        log_p = [log_probabilities(router, student[row][0]) for row, router in enumerate(routers)]
        before_ME = statistics.loads(self._step_sums)[0].clone()
        for row, layer in enumerate(log_p):
            others = teacher[row][1] if row in teacher else None
            statistics.add_tokens_(self._step_sums[row], layer.detach(), student[row][1], real_T, others)
        loss = log_p[0].new_zeros(())
        if self.entropy is not None:
            load_ME = statistics.loads(self._step_sums)[0] - before_ME
            loss = loss + entropy_loss(log_p, load_ME, real_T, self.entropy, self._weight())
        if self.kl_weight:
            if not teacher:
                raise RuntimeError("method.routing.kl_weight: the teacher did not run; set method.distill_weight")
            for row, layer in enumerate(log_p):
                with torch.no_grad():
                    log_q_TE = log_probabilities(routers[row], teacher[row][0])
                loss = loss + self.kl_weight * router_kl(layer, log_q_TE, real_T)
        return loss

    def _weight(self) -> float:
        """λ of the current step."""
        assert self.entropy is not None
        return self.entropy.weight_at(self._step / max(1, self._steps))

    def _limit_logits(self, row: int, logits_TE: Tensor) -> None:
        if self.limit is None or not logits_TE.requires_grad:
            return
        limit, values_TE = self.limit, logits_TE.detach()

        def limited(grad_TE: Tensor) -> Tensor:
            grad_TE, clipped_T, held_T = limit_gradient(grad_TE, values_TE, self._count, limit)
            self._step_sums[row, statistics.CLIPPED] += clipped_T.sum()
            self._step_sums[row, statistics.HELD] += held_T.sum()
            return grad_TE

        logits_TE.register_hook(limited)

    # ---- steps and intervals

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step = trainer.global_step
        skipped: Any = getattr(pl_module, "step_skipped", None)
        if skipped is not None:  # a failed step moves nothing and is in no statistic
            self._step_sums.masked_fill_(skipped > 0, 0)
        if self.bias_speed or self.temperature is not None:
            self._move(sum_over_ranks(self._step_sums))
        self._interval += self._step_sums
        self._step_sums.zero_()
        if self._step % self.log_every == 0 or self._step == self._steps:
            self._close_interval(pl_module)

    def _move(self, sums_MS: Tensor) -> None:
        routers = self.routers.values()
        if self.bias_speed:
            for router, load_E in zip(routers, statistics.loads(sums_MS)[0]):
                update_bias_(router.e_score_correction_bias, load_E, self.bias_speed)  # type: ignore[arg-type]
        if self.temperature is not None:
            tokens_M = sums_MS[:, statistics.TOKENS]
            entropy_M = sums_MS[:, statistics.SCORE_ENTROPY] / tokens_M.clamp_min(1)
            after = torch.where(tokens_M > 0, adapt(self._log_tau, entropy_M, self.temperature), self._log_tau)
            for router, old, new in zip(routers, self._log_tau, after):
                with gathered([router.weight], write=True):  # type: ignore[list-item]
                    fold_(router.weight, old, new)  # type: ignore[arg-type]
            refresh(self._trainer)
            self._log_tau = after

    def _close_interval(self, pl_module: L.LightningModule) -> None:
        self._last = sum_over_ranks(self._interval).clone()
        values_MC = statistics.summary(self._last)
        self._history.append((self._step, torch.cat([values_MC, self._last[:, statistics.TOKENS, None]], 1)))
        for column, name in enumerate(statistics.NAMES):
            if name == "topk_changed" and len(self._taps) == 1:
                continue
            for layer, value in zip(self._layers, values_MC[:, column]):
                pl_module.log(f"routing/layer_{layer}/{name}", value)
        if self.entropy is not None:
            pl_module.log("routing/lambda", self._weight())
        if self.temperature is not None:
            for layer, value in zip(self._layers, self._log_tau.exp()):
                pl_module.log(f"routing/layer_{layer}/temperature", value)
        self._interval.zero_()

    @property
    def last_interval(self) -> tuple[int, list[int], Tensor] | None:
        """Step that ended it, indices of MoE layers, loads (M, E) of all ranks on the device; None before the first."""
        return (self._history[-1][0], self._layers, statistics.loads(self._last)[0]) if self._history else None

    # ---- checkpoint and end

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["qdeepseek_routing"] = {
            "interval": sum_over_ranks(self._interval).clone(), "last": self._last, "log_tau": self._log_tau,
            "history": list(self._history),
        }  # fmt: skip

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get("qdeepseek_routing", {})
        if self.routers:  # DeepSpeed restores after on_fit_start
            self._restore(trainer.is_global_zero)

    def _restore(self, first_rank: bool) -> None:
        state, self._restored = self._restored, {}
        if not state:
            return
        self._history = list(state["history"])
        self._last.copy_(state["last"])
        self._log_tau.copy_(state["log_tau"])
        if first_rank:  # a sum over ranks belongs to one of them
            self._interval.copy_(state["interval"])

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for tap in self._taps:
            tap.remove()
        self._taps = []
        pl_module.auxiliary.pop("routing", None)  # type: ignore[union-attr, operator]

    def finish(self, run: Any, student: nn.Module) -> None:
        """Write routing.json into the run's folder; router weights are trainable again."""
        if self.frozen:
            for router in find_routers(student).values():
                router.requires_grad_(True)
        if self._history:
            write_routing(run.folder / "routing.json", self.facts(run.method.teacher))

    def facts(self, teacher: str = "teacher") -> dict[str, Any]:
        """Statistics by interval and layer, and the loads of the last interval as shares; plain numbers.

        teacher: what the unquantised model is called.
        """
        own, other = statistics.loads(self._last)
        intervals = []
        for step, values in self._history:
            *columns, tokens = [[None if v != v else v for v in column] for column in values.T.tolist()]
            intervals.append({"step": step, "tokens": tokens[0], **dict(zip(statistics.NAMES, columns))})
        load = {"qat": shares(own), **({teacher: shares(other)} if bool(other.any()) else {})}
        return {
            "experts": self._experts, "top_k": self._top_k,
            "layers": self._layers, "intervals": intervals,
            "load": load,
        }  # fmt: skip


def shares(load_ME: Tensor) -> list[list[float]]:
    """Share of the choices of a layer that each of its experts got."""
    return (load_ME / load_ME.sum(-1, keepdim=True).clamp_min(1)).tolist()


@rank_zero_only
def write_routing(file: Path, facts: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(facts) + "\n")
