"""The tensors of a training checkpoint, read slice by slice: a plain Lightning file, or a folder of ZeRO-1, 2 or 3.

    plain    FILE                                            state_dict
    ZeRO-1/2 FOLDER/checkpoint/mp_rank_00_model_states.pt    module: every weight, whole, as the forward used it
    ZeRO-3   …/zero_pp_rank_R_mp_rank_00_model_states.pt     module: buffers, and dtypes of the (empty) weights
             …/*zero_pp_rank_R_mp_rank_00_optim_states.pt    fp32_flat_groups: this rank's part of every weight, one
                                                             after the other in the order of param_shapes

Under ZeRO-3 a weight of n elements lies in W parts of ceil(n / W), part R with rank R, the last one padded; frozen
weights are parts of their own in the model states. The parts are fp32; a bf16 engine's forward used them rounded, which
is what `read` returns (the dtype is that of the module). Layout: deepspeed/utils/zero_to_fp32.py, 0.19.

Nothing is unpickled that could run (export/torch_file.py), and neither DeepSpeed nor a GPU is needed.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qdeepseek.export import torch_file
from qdeepseek.export.torch_file import StoredTensor
from qdeepseek.train.checkpoints import COMPLETE, TAG
from qdeepseek.train.config import ConfigError

PREFIX = "model."  # FineTune.model


class Readable(Protocol):
    """A tensor in files."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Elements begin … end in row-major order, flat."""
        ...


@dataclass(frozen=True)
class Parts:
    """A tensor of ZeRO-3: equal parts, each of which may span several files' tensors.

    ranks   of every rank, the tensors that hold its parts one after the other
    offset  of this tensor's part in them, in elements
    """

    ranks: Sequence[Sequence[StoredTensor]]
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def part(self) -> int:
        return part_size(math.prod(self.shape), len(self.ranks))

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        end = math.prod(self.shape) if end is None else end
        flat = torch.empty(end - begin, dtype=self.dtype)
        done = begin
        while done < end:
            rank, inside = divmod(done, self.part)
            count = min(end - done, self.part - inside)
            for piece in _span(self.ranks[rank], self.offset + inside, count):
                flat[done - begin : done - begin + len(piece)] = piece
                done += len(piece)
        return flat


def part_size(numel: int, ranks: int) -> int:
    return -(-numel // ranks)


def _span(tensors: Sequence[StoredTensor], begin: int, count: int) -> Any:
    """Pieces that make up elements begin … begin + count of the tensors laid end to end."""
    ends = list(accumulate(t.numel for t in tensors))
    while count:
        index = bisect_right(ends, begin)
        inside = begin - (ends[index] - tensors[index].numel)
        size = min(count, ends[index] - begin)
        yield tensors[index].read(inside, inside + size)
        begin, count = begin + size, count - size


@dataclass(frozen=True)
class Saved:
    """An opened checkpoint.

    tensors  parameters and buffers by the model's names
    kind     what it is, for people
    step     optimizer steps that it has behind it
    content  everything else that was saved with it, such as `callbacks`
    """

    path: Path
    kind: str
    step: int
    tensors: Mapping[str, Readable]
    content: Mapping[str, Any]


def open_checkpoint(path: Path) -> Saved:
    """Reads the headers alone. Raises ConfigError for a checkpoint that is missing, half-written or not ours."""
    try:
        if path.is_file():
            return _plain(path)
        if path.is_dir():
            return _zero(path)
    except ValueError as error:
        raise ConfigError(f"checkpoint {path}: {error}") from error
    raise ConfigError(f"checkpoint {path} does not exist; give a file or folder under RUN/checkpoints")


def _plain(path: Path) -> Saved:
    content = torch_file.load(path)
    if not isinstance(content, dict) or "state_dict" not in content or "global_step" not in content:
        raise ValueError("no Lightning checkpoint (it has no state_dict and global_step)")
    return Saved(path, "plain", content["global_step"], _model(content["state_dict"]), content)


def _model(state: Mapping[str, Readable]) -> dict[str, Readable]:
    """Without the prefix of FineTune; refuses a state of anything else."""
    other = [name for name in state if not name.startswith(PREFIX)]
    if other or not state:
        raise ValueError(f"not a state of this project's training module (it has {other[:1] or 'no tensor'})")
    return {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}


def _zero(path: Path) -> Saved:
    folder = path / TAG
    if not (path / COMPLETE).is_file():
        raise ValueError(f"it was written only in part (no file {COMPLETE}); take an older one, or continue the run")
    whole, first = folder / "mp_rank_00_model_states.pt", folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    if whole.is_file():
        content = torch_file.load(whole)
        module = dict(content["module"])
        for name, same in content["shared_params"].items():
            module.setdefault(name, module[same])
        return Saved(path, "ZeRO-1 or 2", content["global_step"], _model(module), content)
    if not first.is_file():
        raise ValueError(f"neither {whole.name} nor {first.name} is in {folder}; is it a DeepSpeed checkpoint?")
    return _stage3(path, folder)


def _stage3(path: Path, folder: Path) -> Saved:
    optimizer = [_optimizer_state(folder, 0)]
    ranks = optimizer[0]["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    optimizer += [_optimizer_state(folder, rank) for rank in range(1, ranks)]
    states = [_load(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", ranks) for rank in range(ranks)]
    steps = {state["global_step"] for state in states}
    if len(steps) > 1:
        raise ValueError(f"its ranks are at different steps, {sorted(steps)}; take an older checkpoint")
    content = states[0]
    module = content["module"]
    groups = [state["fp32_flat_groups"] for state in optimizer]
    found: dict[str, Readable] = {name: module[name] for name in content["buffer_names"]}
    offset = 0
    for name, shape in ((n, s) for group in content["param_shapes"] for n, s in group.items()):
        found[name] = Parts(groups, offset, module[name].dtype, tuple(shape))
        offset += part_size(math.prod(shape), ranks)
    held = {sum(tensor.numel for tensor in rank) for rank in groups}
    if held != {offset}:
        raise ValueError(
            f"its ranks hold {sorted(held)} elements, the weights need {offset}; is a file of another run?"
        )
    for name, shape in (content.get("frozen_param_shapes") or {}).items():
        parts = [[state["frozen_param_fragments"][name]] for state in states]
        found[name] = Parts(parts, 0, module[name].dtype, tuple(shape))
    for name, same in content["shared_params"].items():
        found.setdefault(name, found[same])
    missing = [name for name in module if name not in found]
    if missing:
        raise ValueError(f"{missing[0]} is in no partition; was it saved without its frozen weights?")
    return Saved(path, f"ZeRO-3 of {ranks} ranks", steps.pop(), _model(found), content)


def _optimizer_state(folder: Path, rank: int) -> Mapping[str, Any]:
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    path = next(iter(sorted(folder.glob(f"*{name}"))), folder / name)
    return _load(path, None)["optimizer_state_dict"]


def _load(path: Path, ranks: int | None) -> Any:
    if not path.is_file():
        of = f" of {ranks} ranks" if ranks else ""
        raise ValueError(f"the file {path.name}{of} is missing; copy the whole folder, with the files of every rank")
    return torch_file.load(path)
