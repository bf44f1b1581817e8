"""The LightningModule of every training run: pretraining, unquantised fine-tuning, quantisation-aware training.

loss = (1 − w)·CE + w·KL(teacher ‖ student), see losses.py. The teacher is held outside the module tree: it is
in no parameter group, no checkpoint and no shard.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel

from qdeepseek.routing.routers import keep_routers_exact
from qdeepseek.train.config import OptimConfig
from qdeepseek.train.losses import output_head, token_losses
from qdeepseek.train.models import keeps_fp32
from qdeepseek.train.optim import build_optimizer
from qdeepseek.train.zero import is_partitioned


class AuxiliaryLoss(Protocol):
    """A term beside the main loss, made of what it sees in the model while the loss is computed.

    `record()` is entered around the forward of every training step and of no other forward: not around validation,
    and not around the recomputation of gradient checkpointing, which happens in the backward.
    """

    def record(self) -> AbstractContextManager[None]: ...

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The weighted term of the forward just recorded, a scalar with gradient."""
        ...


class FineTune(L.LightningModule):
    """Next-token training of a causal language model, optionally distilled from `teacher`.

    Args:
        model: student; quantisers already in place where they are wanted.
        optim: optimizer and schedule.
        steps: optimizer steps of the whole run, for the schedule.
        teacher: unquantised model of the same vocabulary, or None.
        distill_weight: w in [0, 1]; needs a teacher when positive.
        max_logits: upper bound on the elements of one chunk of logits.
        stage: prefix of the logged names, such as `qat/loss` and `qat/select_loss`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optim: OptimConfig,
        steps: int,
        teacher: PreTrainedModel | None = None,
        distill_weight: float = 0.0,
        max_logits: int = 2**25,
        stage: str = "train",
    ):
        super().__init__()
        if distill_weight > 0 and teacher is None:
            raise ValueError(
                f"method.distill_weight {distill_weight} needs a teacher; set method.teacher or set it to 0"
            )
        self.model = model.train()
        self.optim, self.steps = optim, steps
        self.distill_weight, self.max_logits, self.stage = distill_weight, max_logits, stage
        self.auxiliary: dict[str, AuxiliaryLoss] = {}  # name -> term, added by callbacks before the first step
        self.step_skipped: Tensor | None = None  # 1 on the device if the last step was skipped, 0 if not (guard)
        self._teacher = (teacher,)  # a tuple, so that it is not registered as a submodule
        for part in (model, teacher):
            if part is not None:
                keep_routers_exact(part)

    @property
    def teacher(self) -> PreTrainedModel | None:
        return self._teacher[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FineTune":
        """Move and cast, but leave in fp32 what the architecture keeps there: `precision: bf16-true` casts the whole
        module, and a router's bias that moves by 1e-3 a step stands still in bf16 from 0.25 on."""

        def routers() -> dict[str, Tensor]:
            tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
            return {name: t for name, t in tensors if keeps_fp32(self.model, name)}

        kept = {name: t.data for name, t in routers().items() if t.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, tensor in routers().items():
            if name in kept and tensor.dtype != torch.float32:
                tensor.data = kept[name].to(tensor.device)
        return self

    def on_fit_start(self) -> None:
        if self.teacher is not None:
            self.teacher.eval().requires_grad_(False)
            if not is_partitioned(self.teacher.parameters()):  # ZeRO-3 places what it splits
                self.teacher.to(self.device)  # type: ignore[arg-type]

    def losses(self, batch: dict[str, Tensor], distill: bool) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy and mean KL of a batch."""
        inputs = {k: v for k, v in batch.items() if k in ("input_ids", "position_ids", "attention_mask")}
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        teacher_hidden = teacher_head = None
        if distill and self.teacher is not None:
            with torch.no_grad():
                teacher_hidden = self.teacher.base_model(**inputs, use_cache=False).last_hidden_state
            teacher_head = self.teacher.get_output_embeddings()
        return token_losses(
            hidden,
            batch["labels"],
            output_head(self.model),
            teacher_hidden,
            teacher_head,
            vocab_size=self.model.config.vocab_size,
            max_logits=self.max_logits,
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        w = self.distill_weight
        with ExitStack() as recording:
            for term in self.auxiliary.values():
                recording.enter_context(term.record())
            ce, kl = self.losses(batch, distill=w > 0)
        loss = ce if w == 0 else (1 - w) * ce + w * kl
        for name, term in self.auxiliary.items():
            extra = term.loss(batch)
            self.log(f"{self.stage}/{name}", extra.detach())
            loss = loss + extra
        self.log(f"{self.stage}/loss", ce.detach(), prog_bar=True)
        if w > 0:
            self.log(f"{self.stage}/kl", kl.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        ce, _ = self.losses(batch, distill=False)
        self.log(f"{self.stage}/select_loss", ce, prog_bar=True, sync_dist=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> Any:
        fused = self._trainer is None or self.trainer.precision != "16-mixed"  # Lightning clips no fused step there
        built = build_optimizer(self.model, self.optim, self.steps, fused)
        built["lr_scheduler"]["name"] = f"{self.stage}/lr"  # of the rates in the log
        return built
