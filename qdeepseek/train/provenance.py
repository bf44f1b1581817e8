"""Which code made a result."""

import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """Commit of the working tree this runs from, with `-dirty` when tracked files changed; None outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None if done.returncode == 0 else None
