"""A ZeRO checkpoint for another number of ranks: DeepSpeed's universal format, one file a parameter and moment.

DeepSpeed 0.19 gives every parameter group the settings of the first when it reads this format at stage 3: learned
scales would go on with the weights' learning rate. `restore_groups` puts each group's own back.

Converted once, beside the checkpoint's own files, by DeepSpeed's `ds_to_universal`; it needs the disk space of the fp32
weights and moments again, and memory for one parameter.
"""

import shutil
from argparse import Namespace
from pathlib import Path

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from qdeepseek.train.checkpoints import TAG
from qdeepseek.train.config import ConfigError

UNIVERSAL = "universal"


def kind_of(path: Path) -> str:
    """What wrote a checkpoint."""
    if path.is_file():
        return "by one device or ddp"
    return "under ZeRO-1 or 2" if (path / TAG / "mp_rank_00_model_states.pt").is_file() else "under ZeRO-3"


def check_resumable(path: Path, strategy: Strategy | str) -> None:
    """Raises ConfigError for a checkpoint that this strategy cannot read."""
    reads = "by one device or ddp"
    if isinstance(strategy, DeepSpeedStrategy):
        reads = "under ZeRO-3" if strategy.zero_stage_3 else "under ZeRO-1 or 2"
    wrote = kind_of(path)
    if wrote != reads:
        raise ConfigError(
            f"checkpoint {path} was written {wrote}, and the strategy of this run reads those written {reads}; "
            f"continue with the strategy of its config.yaml, or start a new run_dir"
        )


def saved_ranks(folder: Path) -> int:
    """How many ranks wrote a ZeRO checkpoint. Raises ConfigError for a folder that has lost its optimizer's files."""
    files = list((folder / TAG).glob("*zero_pp_rank_*_optim_states.pt"))
    if not files:
        raise ConfigError(f"checkpoint {folder} has no *_optim_states.pt of any rank; copy the whole folder again")
    return len(files)


@rank_zero_only
def convert_for(ranks: int, folder: Path) -> None:
    """Convert where another number of ranks will read; before they form a group, whose collectives time out."""
    if saved_ranks(folder) != ranks:
        to_universal(folder)


def to_universal(folder: Path) -> Path:
    """Convert, unless it was done before. One process."""
    target = folder / UNIVERSAL
    if target.exists():
        return target
    from deepspeed.checkpoint import ds_to_universal

    temporary = folder / f"{UNIVERSAL}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder / TAG), output_folder=str(temporary), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip
    temporary.rename(target)
    return target


def restore_groups(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Settings of every parameter group as they were saved."""
    saved = torch.load(folder / UNIVERSAL / "zero" / "optimizer_state.pt", weights_only=False)["param_groups"]
    for group, before in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
