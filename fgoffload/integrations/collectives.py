"""Exchanges small objects between the processes of a training run. A single process exchanges nothing."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fgoffload.errors import OffloadError

Own = TypeVar("Own")


def is_alone() -> bool:
    """Return whether this is the only process."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def is_first_process() -> bool:
    """Return whether this process is rank 0. A single process is rank 0."""
    return is_alone() or torch.distributed.get_rank() == 0


def gather(own: Own) -> list[Own]:
    """Return a list of every process's `own`, in rank order, on all processes."""
    if is_alone():
        return [own]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


def broadcast(own: Own) -> Own:
    """Return rank 0's `own` on all processes. The values that other ranks pass are ignored."""
    box: list[Any] = [own]
    if not is_alone():
        torch.distributed.broadcast_object_list(box, src=0)
    found: Own = box[0]
    return found


def ask_first(make: Callable[[], Own]) -> Own:
    """Call `make` on rank 0 only, and return its result on all processes.

    Raises:
        OffloadError: `make` raised an exception. All processes raise this error, since they all wait for the result.
    """
    found: Any = None
    cause: Exception | None = None
    if is_first_process():
        try:
            found = (make(), "")
        except Exception as error:  # noqa: BLE001 - raised on all processes
            found, cause = (None, f"the first process: {type(error).__name__}: {error}"), error
    result, failure = broadcast(found)
    if failure:
        raise OffloadError(failure) from cause
    answer: Own = result
    return answer
