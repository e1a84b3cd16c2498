"""What a launcher says of this process: which of how many it is."""

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Mapping

from fgoffload.errors import ConfigError, OffloadError

_SIZES = ("RANK", "WORLD_SIZE")
_FIRST_SPEAKS_WITHIN_S = 30.0
"""Longest that a process which has the same error as the first one of its machine waits to be ended by the launcher."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process of a training."""

    rank: int = 0
    """Of this process, from 0."""
    world_size: int = 1
    """Processes of the training."""
    local_rank: int = 0
    """Of this process among those of its machine, from 0."""

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all of them."""
        return self.rank == 0

    @contextlib.contextmanager
    def one_voice(self) -> Iterator[None]:
        """Let an error that every process has be shown by the first one of each machine.

        For what all processes do alike: reading flags and files. The others stay until the launcher ends them. Where that
        takes more than 30 seconds the first one has no error, and they show theirs.
        """
        try:
            yield
        except OffloadError:
            if self.local_rank != 0:
                # A launcher ends all processes as soon as one has ended: to leave now could take the word from the first one,
                # which may still be importing.
                time.sleep(_FIRST_SPEAKS_WITHIN_S)
            raise

    def silence_library(self) -> None:
        """Leave what the library warns of to the first process."""
        if not self.is_first:
            logging.getLogger("fgoffload").setLevel(logging.ERROR)


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Return what `torchrun` has set in `environment`; one process by itself where it set nothing, or one process.

    Raises:
        ConfigError: A variable is no number, or no rank of that many processes.
    """
    if not all(name in environment for name in _SIZES):
        return Launch()
    rank, world_size = (_read_number(environment, name) for name in _SIZES)
    if world_size <= 1:
        return Launch()
    if rank >= world_size:
        raise ConfigError(
            f"RANK {rank} is none of the ranks 0 to {world_size - 1} of WORLD_SIZE {world_size}. Start the processes with "
            "torchrun, or unset WORLD_SIZE to train in one."
        )
    local_rank = _read_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
    return Launch(rank=rank, world_size=world_size, local_rank=local_rank)


def _read_number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"the environment has {name}={text!r}, which is no number. Start the processes with torchrun, or unset {name} to "
            "train in one."
        )
    return int(text)
