"""`qdeepseek export RUN`: from a training checkpoint to a folder that serves, without a GPU and a tensor at a time.

The skeleton of the run's model on the meta device gives names, schemes and config, the checkpoint (saved.py: plain or
ZeRO-1, 2, 3) weights and scales. Codes and scales come from the same functions as those of an export from memory, hence
the same bytes. Adapters are merged one parameter at a time, W' = W + s·B·A, by the function that training used.

What would not be the forward of training is refused: quantisers above their target, or still waiting to switch on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import PreTrainedModel

from qdeepseek.export.compressed_tensors import ExportResult, export
from qdeepseek.export.entries import entries_of
from qdeepseek.export.sources import STATE, SchemeMismatch, quantizer_with, state_prefix
from qdeepseek.export.verify import VerifyReport, verify
from qdeepseek.layers import WeightQuantizer
from qdeepseek.layers.low_rank import add_low_rank
from qdeepseek.surgery import QuantizedTensor, prepare, quantized_tensors
from qdeepseek.train import adapters
from qdeepseek.train.checkpoints import last_checkpoint
from qdeepseek.train.config import ConfigError
from qdeepseek.train.models import DTYPES, checkpoint_folder
from qdeepseek.train.partitioned import empty_model, skeleton
from qdeepseek.train.qat import Run, export_student
from qdeepseek.train.saved import Readable, Saved, open_checkpoint
from qdeepseek.train.zero import is_partitioned


@dataclass(frozen=True)
class Exported:
    """What `export_saved` did: the checkpoint it read, the export, and the proof of it."""

    saved: Saved
    result: ExportResult
    proof: VerifyReport


def export_saved(
    folder: Path, checkpoint: Path | None = None, output: Path | None = None, data_hash: str | None = None
) -> Exported:
    """Exports the QAT student of the run in `folder`.

    checkpoint  default: the newest complete one of the QAT stage
    output      default: RUN/export/FORMAT; an earlier export there is replaced
    data_hash   of the training data, for the manifest; the checkpoint does not know it

    Raises ConfigError for a folder that is no run and for a checkpoint that is missing, broken or of another recipe.
    """
    run = read_run(folder)
    if checkpoint is None:
        newest = last_checkpoint(folder, "qat")
        if newest is None:
            raise ConfigError(f"{folder / 'checkpoints' / 'qat'} holds no complete checkpoint; continue the run first")
        checkpoint = Path(newest)
    saved = open_checkpoint(checkpoint)
    if saved.step < run.method.delay_steps:
        raise ConfigError(
            f"checkpoint {checkpoint} is at step {saved.step} and fake-quant switches on at method.delay_steps "
            f"{run.method.delay_steps}: nothing in it was trained quantised; continue the run"
        )
    model = _skeleton(run)
    adapted = _adapted(run, model)
    prepare(model, run.recipe)
    if "kv_cache" in run.methods:
        run.methods["kv_cache"].attach(run, model)
    result = export(
        model,
        output or folder / "export" / run.export.format,
        recipe=run.recipe,
        dtype=DTYPES[run.export.dtype or run.model.dtype],
        weights=SavedSource(model, saved, adapted, fixed_scales=run.method.rounding == "gptq"),
        source=checkpoint_folder(run.model) if run.model.path else None,
        tokenizer=run.tokenizer,
        source_model=run.model.path,
        data_hash=data_hash,
        max_shard_bytes=run.export.max_shard_bytes,
    )
    return Exported(saved, result, verify(result.folder))


def export_run(run: Run, student: PreTrainedModel) -> VerifyReport:
    """Exports what a run has just trained, and proves it: from memory, or from its checkpoint where ZeRO-3 has the
    student in parts. One process."""
    if is_partitioned(student.parameters()):
        with run.timed("export"):
            return export_saved(run.folder, data_hash=run.data.facts["sha256"]).proof
    folder = export_student(run, student)
    with run.timed("verify"):
        return verify(folder, student)


def read_run(folder: Path) -> Run:
    """The run that wrote `folder`, without its strategy: DeepSpeed need not be installed to export."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{folder} is no run (it has no config.yaml); give the folder that train.py printed")
    config: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    return Run.from_config({**config, "run_dir": str(folder), "strategy": {"name": "auto"}})


def _skeleton(run: Run) -> PreTrainedModel:
    if run.model.path is not None:
        return skeleton(run.model)
    return empty_model(run.base_config, DTYPES[run.model.dtype], run.model.attention)


@dataclass(frozen=True)
class Adapter:
    """Where a parameter's A and B are in the checkpoint, and how they are added to it."""

    a: str
    b: str
    scaling: float
    experts: int | None


def _adapted(run: Run, model: nn.Module) -> dict[str, Adapter]:
    """The adapters that the run put into its student, by parameter; the model is left without them."""
    if "lora" not in run.methods:
        return {}
    lora, found = run.methods["lora"], {}
    adapters.inject(model, lora.targets, lora.rank, lora.alpha)
    for name, module in model.named_modules():
        if isinstance(module, adapters.AdaptedParameter):
            parameter = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
            experts = int(module.num_experts) if module.get_param().ndim == 3 else None
            a, b = (f"{name}.lora_{x}.{adapters.NAME}.weight" for x in "AB")
            found[parameter] = Adapter(a, b, float(module.scaling[adapters.NAME]), experts)
    adapters.remove(model)
    return found


class SavedSource:
    """The exporter's source (export/sources.py) in a checkpoint."""

    def __init__(self, model: nn.Module, saved: Saved, adapted: Mapping[str, Adapter], fixed_scales: bool = False):
        self.saved, self.adapted = saved, adapted
        self._tensors = {name.replace(".base_layer", ""): tensor for name, tensor in saved.tensors.items()}
        self._merged: tuple[str, Tensor | None] = ("", None)
        self._check(model, fixed_scales)

    def weight(self, parameter: str, expert: int | None = None) -> Tensor:
        if parameter in self.adapted:
            whole = self._merge(parameter)
            return whole if expert is None else whole[expert]
        return _slice(self._tensors[parameter], expert)

    def quantizer(self, tensor: QuantizedTensor, expert: int | None, weight_OI: Tensor) -> WeightQuantizer:
        prefix = state_prefix(tensor.name)
        found = {key: self._tensors[prefix + key] for key in STATE if prefix + key in self._tensors}
        return quantizer_with(tensor, expert, weight_OI, {key: _slice(value, expert) for key, value in found.items()})

    def _merge(self, parameter: str) -> Tensor:
        """W' of one parameter; all its experts at once, as in training, so that the bits are the same."""
        name, whole = self._merged
        if whole is None or name != parameter:
            adapter = self.adapted[parameter]
            a, b = (_slice(self.saved.tensors[key]) for key in (adapter.a, adapter.b))
            whole = add_low_rank(_slice(self._tensors[parameter]), *adapters.by_expert(a, b, adapter.experts),
                                 adapter.scaling)  # fmt: skip
            self._merged = (parameter, whole)
        return whole

    def _check(self, model: nn.Module, fixed_scales: bool) -> None:
        """Refuses a checkpoint that is not one of this model with this recipe."""
        where, tensors = f"checkpoint {self.saved.path}", self._tensors
        for entry in entries_of(model):
            stored = tensors.get(entry.parameter)
            shape = None if stored is None else stored.shape
            if shape != tuple(entry.tensor.shape):
                raise ConfigError(
                    f"{where}: {entry.parameter} is {shape or 'missing'}, the model of the run's config.yaml has "
                    f"{tuple(entry.tensor.shape)}; is it a checkpoint of another run?"
                )
        raised = [name for name in tensors if name.endswith("_quantizer.level")]
        if raised:
            raise ConfigError(
                f"{where}: {len(raised)} quantisers stand above their target, first {raised[0]}; train to the end, "
                f"where they are back (method.precision.finalize: target), or let the run itself export"
            )
        self._check_state(model, fixed_scales)
        extra = [name for name in tensors if ".lora_" in name]
        if bool(extra) != bool(self.adapted):
            there = f"adapters (first {extra[0]})" if extra else "no adapters"
            raise ConfigError(f"{where} has {there}, and method.lora is {'off' if extra else 'on'} in config.yaml")

    def _check_state(self, model: nn.Module, fixed_scales: bool) -> None:
        """Quantisers must have exactly the state that the recipe gives them, fixed scales (GPTQ) besides."""
        wanted, optional = set(), set()
        for tensor in quantized_tensors(model):
            prefix = state_prefix(tensor.name)
            own = {prefix + key for key in STATE if getattr(tensor.quantizer, key) is not None}
            wanted |= own
            optional |= {prefix + key for key in ("scale", "zero") if fixed_scales} - own
        stored = {name for name in self._tensors if name.rpartition(".")[0].endswith("_quantizer")}
        odd = sorted(wanted - stored) or sorted(stored - wanted - optional)
        if odd:
            raise SchemeMismatch(
                f"checkpoint {self.saved.path} {'lacks' if odd[0] in wanted else 'has'} {odd[0]}: it was not trained "
                f"with the recipe in the run's config.yaml"
            )


def _slice(tensor: Readable, expert: int | None = None) -> Tensor:
    """The tensor, or one expert of it."""
    if expert is None:
        return tensor.read().view(tensor.shape)
    size = torch.Size(tensor.shape[1:]).numel()
    return tensor.read(expert * size, (expert + 1) * size).view(tensor.shape[1:])
