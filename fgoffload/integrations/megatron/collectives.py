"""What processes of a training tell each other outside of its tensors. In a process by itself nothing is exchanged."""

from typing import Any, TypeVar

import torch

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
