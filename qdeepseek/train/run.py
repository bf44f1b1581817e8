"""One fit: trainer, loggers, checkpoints and resuming from config, the same for every stage."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities import GradClipAlgorithmType

from qdeepseek.train import slurm
from qdeepseek.train.callbacks.preemption import Preemption
from qdeepseek.train.callbacks.progress import StepProgress
from qdeepseek.train.callbacks.rng import RandomState
from qdeepseek.train.checkpoints import Checkpoints, drop_unfinished, last_checkpoint
from qdeepseek.train.stop import StopRequest
from qdeepseek.train.universal import check_resumable, convert_for

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")


@dataclass(frozen=True)
class TrainerConfig:
    """Length and cost of a fit. Steps are optimizer steps; one uses batch_size × accumulate × ranks sequences.

    `devices: auto` in a Slurm job step means the job's own tasks a node, and its nodes.
    """

    steps: int
    accumulate: int = 1
    clip_norm: float = 1.0
    precision: str = "32-true"
    validate_every: int = 50
    checkpoint_every: int = 50
    log_every: int = 1
    threads: int | None = None
    accelerator: str = "auto"
    devices: int | str = "auto"
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "validate_every", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
        if self.devices == 0:
            raise ValueError("devices 0 must be at least 1, or auto")
        if self.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
            raise ValueError(f"accelerator {self.accelerator}: torch sees no CUDA device; use auto or cpu")


def ranks_of(config: TrainerConfig) -> int:
    """Processes that a run with this configuration trains in, known before any of them is started."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    devices, nodes = slurm.shape(config.devices, config.nodes)
    if devices in ("auto", -1, "-1"):
        devices = torch.cuda.device_count() if config.accelerator != "cpu" and torch.cuda.is_available() else 1
    return nodes * (len(devices.split(",")) if isinstance(devices, str) and "," in devices else int(devices))


def build_trainer(
    config: TrainerConfig,
    folder: Path,
    name: str,
    *,
    strategy: Strategy | str = "auto",
    logger: list[Logger] | bool = False,
    callbacks: list[Callback] | None = None,
    stop: StopRequest | None = None,
    validate: bool = True,
) -> L.Trainer:
    """Trainer with checkpoints in folder/checkpoints/name, last.ckpt a link to the newest; `stop` ends a fit early.

    A checkpoint to resume from is looked at, and converted where need be, before ranks form a group: raises ConfigError
    where `strategy` cannot read it.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    checkpoints = Checkpoints(
        folder / "checkpoints" / name, filename="{step}", every_n_train_steps=config.checkpoint_every,
        save_last="link", save_top_k=1, monitor="step", mode="max", enable_version_counter=False,
        save_on_train_epoch_end=False,
    )  # fmt: skip
    devices, nodes = slurm.shape(config.devices, config.nodes)
    own_precision = precision_plugins(config.precision, config.accelerator, strategy)
    trainer = L.Trainer(
        max_steps=config.steps,
        max_epochs=-1,
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=config.clip_norm,
        precision=None if own_precision else config.precision,  # type: ignore[arg-type]
        accelerator=config.accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        plugins=[*own_precision, *slurm.environments()],
        logger=logger,
        callbacks=[
            *(callbacks or []),
            StepProgress(name),
            RandomState(),
            *([LearningRateMonitor("step")] if logger else []),
            checkpoints,
            *([Preemption(stop)] if stop is not None else []),
        ],
        val_check_interval=config.validate_every * config.accumulate,
        check_val_every_n_epoch=None,
        limit_val_batches=None if validate else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=config.log_every,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    resumed = last_checkpoint(folder, name)
    if resumed is not None:
        check_resumable(Path(resumed), strategy)
        if isinstance(strategy, DeepSpeedStrategy):
            convert_for(trainer.num_devices * trainer.num_nodes, Path(resumed))
    return trainer


class BF16Mixed(MixedPrecision):
    """Lightning refuses to clip for an optimizer that unscales gradients itself (fused AdamW), also where nothing is
    scaled; the guard needs that optimizer to skip a step without a sync."""

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = None) -> None:
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm or GradClipAlgorithmType.NORM)


def precision_plugins(precision: str, accelerator: str, strategy: Strategy | str) -> list[Precision]:
    """What stands for Lightning's own `precision`; empty where that serves."""
    if precision != "bf16-mixed" or isinstance(strategy, DeepSpeedStrategy):
        return []
    return [BF16Mixed("bf16-mixed", "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")]


def start_processes(trainer: L.Trainer) -> None:
    """Launch the other processes and join them now, before the fit, for a model that they load together."""
    if torch.distributed.is_initialized():
        return
    launcher = trainer.strategy.launcher
    if launcher is not None:
        launcher.launch(lambda: None, trainer=trainer)
    trainer.strategy.setup_environment()


def fit(
    trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule, folder: Path, name: str
) -> dict[str, Any]:
    """Train, resuming from the stage's newest checkpoint when there is one; returns the logged metrics."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    drop_unfinished(folder, name)
    trainer.fit(module, datamodule=data, ckpt_path=last_checkpoint(folder, name), weights_only=False)
    return {key: float(value) for key, value in trainer.callback_metrics.items()}
