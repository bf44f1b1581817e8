"""LoRA-QAT, `method/lora=default`: only A and B of W' = W + (alpha / rank)·B·A are trained, fake-quant acts on W'.

Merging afterwards writes the W' of the last forward, so the export holds exactly the codes that were trained (see
train/adapters.py); merging into a quantised W and quantising again would not. Routers, norms, embeddings and W are
frozen: AdamW keeps state for A, B and, with `scales`, for the learned quantisation scales.

Scales are found from W while B·A is zero, hence from W'. An adapter that is continued is loaded first, and scales are
found again from its W'.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from qdeepseek.layers import WeightQuantizer
from qdeepseek.layers.low_rank import low_rank_norm
from qdeepseek.surgery import initialize_quantizers, quantized_tensors
from qdeepseek.train import adapters
from qdeepseek.train.callbacks.compensation_cage import Cage
from qdeepseek.train.callbacks.compensation_lsq import ScaleGradients
from qdeepseek.train.callbacks.precision import Precision
from qdeepseek.train.config import ConfigError, OptimConfig
from qdeepseek.train.zero import gathered, is_partitioned

STAGES = ("both", "qat")
NEED_WEIGHTS: dict[str, tuple[type, ...]] = {"compensation": (Cage, ScaleGradients), "precision": (Precision,)}


class LoRA(Callback):
    """Adapters instead of a full fine-tune.

    Args:
        rank, alpha: of every adapter; s = alpha / rank.
        lr: peak learning rate of A and B, in place of that of optim and qat_optim; schedule and the rest are theirs.
        targets: parts (attention, mlp, shared_experts, routed_experts) or ends of module names; None is every part.
        scales: whether learned quantisation scales are trained too, at qat_optim.scale_lr.
        stages: both, so that FP_ft is trained with adapters as well (and merged), or qat, which leaves FP_ft a full
            fine-tune.
        adapter: peft folder that the adapters of QAT begin with; it belongs to the base, so method.start must be base.
        dropout: must be 0; it would act on a layer's input, where an adapter of the weight has no input of its own.
        log_every: optimizer steps between two records of ‖s·B·A‖ / ‖W‖, its mean and its largest over the adapters.
    """

    def __init__(
        self,
        rank: int = 16,
        alpha: int = 32,
        lr: float = 1e-3,
        targets: Sequence[str] | None = None,
        scales: bool = True,
        stages: str = "both",
        adapter: str | None = None,
        dropout: float = 0.0,
        log_every: int = 50,
    ):
        if rank < 1 or alpha <= 0 or lr <= 0 or log_every < 1:
            raise ValueError(f"rank {rank}, alpha {alpha}, lr {lr} and log_every {log_every} must be positive")
        if dropout:
            raise ValueError(
                f"dropout {dropout}: adapters are added to the weight before it is quantised, so there is no adapter "
                f"input to drop; set it to 0"
            )
        if stages not in STAGES:
            raise ValueError(f"stages {stages!r} is unknown; use one of {', '.join(STAGES)}")
        if isinstance(targets, str) or (targets is not None and not targets):
            raise ValueError(f"targets {targets!r} must be a list such as [attention, mlp], or null for every part")
        self.rank, self.alpha, self.lr, self.targets = rank, alpha, lr, targets
        self.scales, self.stages, self.log_every = scales, stages, log_every
        self.adapter = None if adapter is None else Path(adapter)
        self._norms: list[Tensor] = []
        self._step = 0

    def check(self, run: Any, model: nn.Module) -> None:
        """Raises ConfigError for targets or an adapter that cannot work, before any training."""
        adapters.targets_of(model, self.targets)
        for group, kinds in NEED_WEIGHTS.items():
            if isinstance(run.methods.get(group), kinds):
                raise ConfigError(
                    f"method.{group} works with the gradients of the quantised weights themselves, which method.lora "
                    f"freezes; set method/{group}=off or method/lora=off"
                )
        if self.adapter is None:
            return
        adapters.check_folder(self.adapter, self.rank, self.alpha)
        if run.method.start != "base":
            raise ConfigError(
                f"method.lora.adapter {self.adapter}: it was trained on other weights than method.start "
                f"{run.method.start} gives; set method.start=base and model.path to the model it belongs to"
            )
        if run.method.rounding == "gptq" or run.rotates:
            raise ConfigError(
                f"method.lora.adapter {self.adapter}: GPTQ's codes and a rotation are made of the base without it; "
                f"set method.rounding=nearest and method.rotate=never"
            )
        adapters.inject(model, self.targets, self.rank, self.alpha)
        try:
            adapters.load(model, self.adapter)
        finally:
            adapters.remove(model)

    def optim(self, config: OptimConfig) -> OptimConfig:
        """The optimizer's configuration with the adapters' learning rate: they are all that it calls matrices."""
        return replace(config, lr=self.lr)

    @property
    def unquantised(self) -> bool:
        """Whether FP_ft is trained with adapters too."""
        return self.stages == "both"

    def attach(self, run: Any, student: nn.Module) -> None:
        quantizers = [module for module in student.modules() if isinstance(module, WeightQuantizer)]
        for wrapper in adapters.inject(student, self.targets, self.rank, self.alpha):
            wrapper.recompute = run.method.recompute
        for quantizer in quantizers:
            for scale in quantizer.parameters(recurse=False):
                scale.requires_grad_(self.scales)
        if quantizers and self.adapter is not None:
            adapters.load(student, self.adapter)
            with adapters.merged(student):
                initialize_quantizers(student)

    def finish(self, run: Any, student: nn.Module) -> None:
        """Save the adapters, as additions to the weights that they were attached to, and merge them."""
        quantised = next(quantized_tensors(student), None) is not None
        start = run.method.start if quantised else "base"
        base = str(run.model.path) if start == "base" else str((run.unquantised / start).absolute())
        folder = run.folder / "adapter" if quantised else run.unquantised / "adapter_fp_ft"
        wrappers = adapters.adapters(student)
        with gathered(p for w in wrappers for part in (w.lora_A, w.lora_B) for p in part.parameters()):
            rank_zero_only(adapters.save)(student, folder, base)
        if not is_partitioned(student.parameters()):  # else save_model and the export merge, a parameter at a time
            adapters.merge(student, run.device)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._norms = []
        for wrapper in adapters.adapters(pl_module):
            with gathered([wrapper.get_param()]):
                self._norms.append(wrapper.get_param().detach().float().norm())
        self._step = trainer.global_step

    @staticmethod
    def _ratio(wrapper: adapters.AdaptedParameter, norm: Tensor) -> Tensor:
        with gathered([*wrapper.lora_A.parameters(), *wrapper.lora_B.parameters()]):
            return low_rank_norm(*wrapper.factors()) / norm

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:  # inside an accumulation
            return
        self._step = trainer.global_step
        if self._step % self.log_every == 0:
            ratios = torch.stack([self._ratio(*pair) for pair in zip(adapters.adapters(pl_module), self._norms)])
            pl_module.log("lora/delta_mean", ratios.mean())
            pl_module.log("lora/delta_max", ratios.max())
