"""Folders that are either complete or absent: written beside their place and renamed."""

import shutil
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qdeepseek.train.adapters import merged
from qdeepseek.train.gathered import save_gathered
from qdeepseek.train.zero import is_partitioned


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, destination: Path) -> None:
    """`save_pretrained` of model, adapters merged, and tokenizer; a complete folder means a finished stage.

    All ranks call it: rank 0 writes, the others give their share of partitioned parameters.
    """
    if is_partitioned(model.parameters()):
        save_gathered(model, tokenizer, destination)
    else:
        _save_whole(model, tokenizer, destination)


@rank_zero_only
def _save_whole(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, destination: Path) -> None:
    temporary = destination.with_name(destination.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    with merged(model):
        model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(destination, ignore_errors=True)
    temporary.rename(destination)
