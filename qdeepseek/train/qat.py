"""The stages of the main job as functions of one `Run`; `train.py` calls them in order.

    base ──N steps──────────────────────────────▶ FP_ft      unquantised: the ceiling and the teacher
      └──(1 − f)·N steps──▶ branch ──f·N steps──▶ QAT        same tokens, INT4 in the loop for the last f·N

QAT starts from a point of the unquantised run (`method.start: branch`), so both columns see the same number of
tokens. Every stage leaves a folder under the run's folder and is skipped when that folder is complete, so a
killed run continues where it stopped: `run_dir=<the same folder>`.
"""

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qdeepseek.export.checkpoint import Checkpoint
from qdeepseek.export.compressed_tensors import export
from qdeepseek.export.names import layout_of
from qdeepseek.ptq.gptq import gptq
from qdeepseek.surgery import Coverage, Recipe, plan, prepare
from qdeepseek.surgery.families import is_mtp_parameter
from qdeepseek.surgery.rotate import check_rotatable, rotate
from qdeepseek.train import methods, streaming, unquantised
from qdeepseek.train import strategy as strategies
from qdeepseek.train.callbacks.balance import LossFreeBalance
from qdeepseek.train.callbacks.branch import SaveBranch
from qdeepseek.train.callbacks.fake_quant import FakeQuant
from qdeepseek.train.callbacks.same_config import SameConfig
from qdeepseek.train.config import ConfigError, ExportConfig, MethodConfig, OptimConfig, build
from qdeepseek.train.data import BuiltData, DataConfig, build_data
from qdeepseek.train.loggers import LoggerConfig, loggers, wandb_logger
from qdeepseek.train.models import DTYPES, ModelConfig, checkpoint_folder, load_model, load_tokenizer, read_config
from qdeepseek.train.module import FineTune
from qdeepseek.train.partitioned import load_partitioned, skeleton
from qdeepseek.train.provenance import git_commit
from qdeepseek.train.run import TrainerConfig, build_trainer, fit, start_processes
from qdeepseek.train.save import save_model
from qdeepseek.train.stop import StopRequest, world_size
from qdeepseek.train.tracking import tracking
from qdeepseek.train.zero import ZeroConfig, deepspeed_config


@dataclass
class Run:
    """Everything a stage needs: parsed configuration, folder, data, tokenizer, loggers, and the seconds spent."""

    config: dict[str, Any]
    folder: Path
    seed: int
    model: ModelConfig
    method: MethodConfig
    optim: OptimConfig
    qat_optim: OptimConfig
    trainer: TrainerConfig
    recipe: Recipe
    data_config: DataConfig
    logger: LoggerConfig
    export: ExportConfig
    methods: dict[str, Any] = field(default_factory=dict)
    strategy: strategies.Parsed = "auto"
    callbacks: tuple[Callback, ...] = ()
    stop: StopRequest = field(default_factory=StopRequest)
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # of this process: what other load does not stretch

    @classmethod
    def from_config(cls, config: Mapping[str, Any], stop: StopRequest | None = None) -> "Run":
        """Parse every group; raises ConfigError on the first wrong value, before anything is loaded."""
        try:
            recipe = Recipe.from_config(config["quant"])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        own, groups = methods.split(config["method"])
        if not isinstance(config["evaluate"], bool):
            raise ConfigError(f"evaluate {config['evaluate']} must be true or false")
        return cls(
            config=dict(config),
            folder=Path(config["run_dir"]),
            seed=int(config["seed"]),
            model=build(ModelConfig, config["model"], "model"),
            method=build(MethodConfig, own, "method"),
            optim=build(OptimConfig, config["optim"], "optim"),
            qat_optim=build(OptimConfig, config["qat_optim"], "qat_optim"),
            trainer=build(TrainerConfig, config["trainer"], "trainer"),
            recipe=recipe,
            data_config=DataConfig.parse(config["data"]),
            logger=build(LoggerConfig, config["logger"], "logger"),
            export=build(ExportConfig, config["export"], "export"),
            methods=methods.build_methods(groups),
            strategy=strategies.parse(config),
            stop=stop or StopRequest(),
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.model)

    @cached_property
    def wandb(self) -> WandbLogger | None:
        return wandb_logger(self.logger, self.folder, self.config, self.stop)

    @cached_property
    def data(self) -> BuiltData:
        with self.timed("data"):
            masks = not self.model.attention.startswith("flash")
            return build_data(self.data_config, self.tokenizer, self.base_config, self.seed, masks)

    @cached_property
    def base_config(self) -> Any:
        return read_config(self.model)

    @property
    def unquantised(self) -> Path:
        """Where `branch` and `fp_ft` lie: the run's own folder, or one that several runs share."""
        return unquantised.folder_of(self.config)

    @property
    def device(self) -> torch.device:
        """Where this process searches scales, calibrates and evaluates; Lightning places what it trains itself."""
        if self.trainer.accelerator == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))

    @property
    def qat_steps(self) -> int:
        """Steps with quantisers in place: f·N, at least one."""
        return max(1, round(self.method.qat_fraction * self.trainer.steps))

    def load(self, which: str) -> PreTrainedModel:
        """`base`, or a folder that an earlier stage wrote: `branch`, `fp_ft`."""
        return load_model(self.stage_config(which))

    def stage_config(self, which: str) -> ModelConfig:
        """`base`, or the folder that an earlier stage wrote, as a model to load."""
        if which == "base":
            return self.model
        return replace(self.model, path=str((self.unquantised / which).absolute()), scratch=None, revision=None)

    @property
    def whole_because(self) -> str | None:
        """Why models are not streamed into partitions (streaming.py); None where they are."""
        if not (isinstance(self.strategy, ZeroConfig) and self.strategy.stage == 3):
            return f"strategy={self.config['strategy']['name']} holds models whole"
        return streaming.whole_because(self.model, self.method, self.recipe, "lora" in self.methods)

    @property
    def streams(self) -> bool:
        """Whether models are read tensor by tensor into partitions, so that no rank ever holds one whole."""
        return self.whole_because is None

    @property
    def rotates(self) -> bool:
        """Whether the student is rotated before quantisers are put in."""
        return streaming.rotates(self.method, self.recipe)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        self.cpu_seconds[stage] = self.cpu_seconds.get(stage, 0.0) + time.process_time() - cpu
        self.stop.stage_ended(stage)


def check(run: Run) -> Coverage:
    """Coverage of the base by the recipe; raises CoverageError or ConfigError before any training."""
    streaming.check_streams(run.model.expert_chunks, run.whole_because)
    model = skeleton(run.model) if run.streams else run.load("base")
    coverage = plan(model, run.recipe)
    layout_of(str(model.config.model_type), fused=coverage.expert_share is not None)
    methods.check(run.methods, run, model)
    if run.rotates:
        check_rotatable(model)
    if run.rotates and run.model.path is not None:
        folder = checkpoint_folder(run.model)
        layers = model.config.num_hidden_layers
        extra = [name for name in Checkpoint(folder) if is_mtp_parameter(name, layers)]
        if extra:
            raise ConfigError(
                f"method.rotate {run.method.rotate}: the checkpoint's multi-token-prediction module ({extra[0]}, …) is "
                f"copied as it is and would read a rotated stream; set method.rotate=never, or remove those tensors"
            )
    return coverage


def _trainer(run: Run, stage: str, steps: int, callbacks: list[Callback], folder: Path) -> L.Trainer:
    watching = tracking(run.logger, run.wandb, callbacks)
    return build_trainer(
        replace(run.trainer, steps=steps), folder, stage,
        strategy=strategies.make(run.strategy, run.trainer.precision),
        logger=loggers(run.folder, stage, run.wandb), stop=run.stop,
        callbacks=[SameConfig(run.config), *callbacks, *run.callbacks, *watching],
    )  # fmt: skip


def _model(run: Run, trainer: L.Trainer, which: str, recipe: Recipe | None = None) -> PreTrainedModel:
    """The model of a stage, prepared by `recipe` if it is streamed into partitions (`Run.streams`)."""
    if not run.streams:
        return run.load(which)
    assert isinstance(run.strategy, ZeroConfig)
    start_processes(trainer)
    return load_partitioned(run.stage_config(which), recipe, deepspeed_config(run.strategy, run.trainer.precision))


def fine_tune(run: Run) -> Path:
    """FP_ft: the unquantised model after N steps, and the branch point on the way. Returns its folder."""
    with unquantised.claimed(run.config) as folder:
        done = folder / "fp_ft"
        if (done / "config.json").exists():
            rank_zero_info(f"fp_ft: complete, taken from {done}")
        else:
            _fine_tune(run, folder, done)
    return done


def _fine_tune(run: Run, folder: Path, done: Path) -> None:
    with run.timed("fp_ft"):
        L.seed_everything(run.seed, verbose=False)
        branch = SaveBranch(run.trainer.steps - run.qat_steps, folder / "branch", run.tokenizer)
        balance = [LossFreeBalance(run.method.balance_speed)] if run.method.balance_speed else []
        here = methods.unquantised(run.methods)
        trainer = _trainer(run, "fp_ft", run.trainer.steps, [*balance, branch, *methods.callbacks(here)], folder)
        model = _model(run, trainer, "base")
        methods.attach(here, run, model)
        module = FineTune(model, methods.optim(here, run.optim), run.trainer.steps, stage="fp_ft")
        fit(trainer, module, run.data.module(), folder, "fp_ft")
        methods.finish(here, run, model)
        save_model(model, run.tokenizer, done)
        trainer.strategy.barrier()


def put_quantisers(run: Run, student: PreTrainedModel) -> None:
    """Rotate where asked, put quantisers in place, and start from GPTQ's codes where asked."""
    student.to(run.device)  # type: ignore[arg-type]
    if run.rotates:
        rotate(student, seed=run.seed)
    prepare(student, run.recipe)
    if run.method.rounding == "gptq":
        gptq(student, run.data.calibration(run.method.gptq_sequences, run.device))


def quantise_aware(run: Run, prepare_student: Callable[[PreTrainedModel], object] | None = None) -> PreTrainedModel:
    """The QAT student after its steps, quantisers in place.

    prepare_student: puts quantisers into the student; None is `surgery.prepare` with the run's recipe.
    """
    method = run.method
    with run.timed("qat"):
        L.seed_everything(run.seed, verbose=False)
        fake_quant = FakeQuant(method.delay_steps, method.cache, method.recompute)
        trainer = _trainer(run, "qat", run.qat_steps, [fake_quant, *methods.callbacks(run.methods)], run.folder)
        if run.streams and prepare_student is None:
            student = _model(run, trainer, method.start, run.recipe)
        else:
            student = run.load(method.start)
            (prepare_student or partial(put_quantisers, run))(student)
        methods.attach(run.methods, run, student)
        teacher = _model(run, trainer, method.teacher) if method.distill_weight > 0 else None
        optim = methods.optim(run.methods, run.qat_optim)
        module = FineTune(student, optim, run.qat_steps, teacher, method.distill_weight, stage="qat")
        done = run.trainer.steps - run.qat_steps if method.start == "branch" else 0
        fit(trainer, module, run.data.module(done * run.trainer.accumulate), run.folder, "qat")
        methods.finish(run.methods, run, student)
    return student.eval()


def export_student(run: Run, student: PreTrainedModel) -> Path:
    """Write the QAT student as a folder that serves; an earlier complete export of this run is replaced."""
    options = run.export
    with run.timed("export"):
        return export(
            student,
            run.folder / "export" / options.format,
            recipe=run.recipe,
            dtype=DTYPES[options.dtype or run.model.dtype],
            source=checkpoint_folder(run.model) if run.model.path else None,
            tokenizer=run.tokenizer,
            source_model=run.model.path,
            data_hash=run.data.facts["sha256"],
            max_shard_bytes=options.max_shard_bytes,
        ).folder


def facts(run: Run) -> dict[str, Any]:
    """What the report says about the run: seed, commit, versions, data, tokens of every column."""
    ranks = world_size()
    sequences = run.trainer.steps * run.trainer.accumulate * run.data.loader.batch_size * ranks
    extra = run.qat_steps / run.trainer.steps if run.method.start == "fp_ft" else 0.0
    return {
        "model": run.model.path,
        "scheme": run.recipe.name,
        "seed": run.seed,
        "commit": git_commit(),
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "device": f"{platform.machine()}, {torch.get_num_threads()} threads"
        if run.device.type == "cpu"
        else f"{ranks} × {torch.cuda.get_device_name(run.device)}",
        "rotated": run.rotates,
        "kv_cache": run.methods["kv_cache"].scheme.label if "kv_cache" in run.methods else None,
        "data": run.data.facts,
        "evaluated_on": run.data.loader.evaluate,
        "steps": {"fp_ft": run.trainer.steps, "qat": run.qat_steps, "qat_starts_from": run.method.start},
        "tokens": {
            "fp_ft": sequences * run.data.length,
            "qat": round(sequences * (1 + extra) * run.data.length) if run.method.start != "base"
            else round(sequences * run.data.length * run.qat_steps / run.trainer.steps),
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning", "compressed-tensors")},
    }  # fmt: skip
