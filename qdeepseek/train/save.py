"""Folders that are either complete or absent: written beside their place and renamed."""

import shutil
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@rank_zero_only
def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, destination: Path) -> None:
    """`save_pretrained` of model and tokenizer; a complete folder means a finished stage."""
    temporary = destination.with_name(destination.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(destination, ignore_errors=True)
    temporary.rename(destination)
