"""What a run prints: its own tables and progress bars, and warnings that concern the user."""

import logging
import warnings

from transformers.utils import logging as transformers_logging


def quiet() -> None:
    """Silence start-up banners and loading bars of the libraries, and known warnings about their own internals."""
    for name in ("lightning.pytorch", "lightning.fabric", "compilers"):  # compilers: DeepSpeed's trials of gcc
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*Experiment logs directory.*")
    warnings.filterwarnings("ignore", message=".*The `srun` command is available on your system but is not used.*")
    warnings.filterwarnings("ignore", message=".*torch.distributed.(all_gather_into|reduce_scatter)_tensor.*")
