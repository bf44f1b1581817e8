"""An error of rank 0 becomes one of every rank, after collectives that all of them had to finish together."""

import torch.distributed as dist


def raise_everywhere(error: Exception | None, what: str) -> None:
    """Raises rank 0's `error` there, and an OSError that says `what` failed on the other ranks; collective."""
    message = [None if error is None else f"{what}: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(message, 0)
    if message[0] is not None:
        raise error or OSError(message[0])
