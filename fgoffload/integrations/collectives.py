"""Exchanges small objects between the processes of a training. A single process exchanges nothing."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fgoffload.errors import OffloadError

Own = TypeVar("Own")


def is_alone() -> bool:
    """Return whether there is no other process."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def is_first_process() -> bool:
    """Return whether this process is the first of all."""
    return is_alone() or torch.distributed.get_rank() == 0


def gather(own: Own) -> list[Own]:
    """Return what all processes have of a kind, in their order, on each of them."""
    if is_alone():
        return [own]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


def broadcast(own: Own) -> Own:
    """Return what the first process has, on all of them: what the others have is not looked at."""
    box: list[Any] = [own]
    if not is_alone():
        torch.distributed.broadcast_object_list(box, src=0)
    found: Own = box[0]
    return found


def ask_first(make: Callable[[], Own]) -> Own:
    """Return what `make` returns on the first process, which alone calls it, on all of them.

    Raises:
        OffloadError: It raised: on all alike, since the others wait for an answer.
    """
    found: Any = None
    cause: Exception | None = None
    if is_first_process():
        try:
            found = (make(), "")
        except Exception as error:  # noqa: BLE001 - whatever it is
            found, cause = (None, f"the first process: {type(error).__name__}: {error}"), error
    result, failure = broadcast(found)
    if failure:
        raise OffloadError(failure) from cause
    answer: Own = result
    return answer
