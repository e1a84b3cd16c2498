"""What is off the clock where steps of a training are timed and compared."""

import gc

import torch

from fgoffload.integrations.megatron.adapter.collectives import is_alone


def settle() -> None:
    """Do before a step what must not come inside of it, on all processes."""
    # A collection takes as long as a layer, and comes when objects have been counted.
    gc.collect()
    if not is_alone():
        # A stage that begins before the others would count how long it waits for them.
        torch.distributed.barrier()
