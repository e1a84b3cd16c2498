"""Reads the rank and world size of this process from the environment variables that its launcher sets."""

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping

from fgoffload.errors import ConfigError, OffloadError

_SINGLE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""Environment variables that Megatron-LM requires, with their values for a single process."""

_PATIENCE_S = 30.0
"""Seconds that the other ranks wait before they show an error, so that local rank 0 can show the same error first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process of a training run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints for all ranks."""
        return self.rank == 0

    @contextlib.contextmanager
    def show_errors_once(self) -> Iterator[None]:
        """Show an error only once, on local rank 0, if all processes of a machine raise it.

        Use this for work that all processes repeat, such as reading flags and files. The other processes wait until the
        launcher ends them. After 30 seconds, they assume that local rank 0 has no error, and show their own error.
        """
        try:
            yield
        except OffloadError:
            if self.local_rank != 0:
                # The launcher ends all processes as soon as one exits, possibly before local rank 0 has shown the error.
                time.sleep(_PATIENCE_S)
            raise


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read rank and world size from the variables that `torchrun` sets. Without them, assume a single process."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return Launch()
    rank, world_size = (_read_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if world_size <= 1:
        return Launch()
    if rank >= world_size:
        raise ConfigError(
            f"RANK {rank} is not below WORLD_SIZE {world_size}. Start the processes with "
            "torchrun, or unset WORLD_SIZE to train in a single process."
        )
    local_rank = _read_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
    return Launch(rank=rank, world_size=world_size, local_rank=local_rank)


def set_up_process(environment: MutableMapping[str, str]) -> int:
    """Return the rank of this process. Without a launcher, set the variables in `environment` for a single process."""
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environment]
    if not given:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))  # a free port
            environment.setdefault("MASTER_PORT", str(listener.getsockname()[1]))
        for name, value in _SINGLE.items():
            environment.setdefault(name, value)
        return 0
    if len(given) < 3:
        raise ConfigError(
            f"the environment sets {' and '.join(given)}, but not all of RANK, WORLD_SIZE and LOCAL_RANK. Start the processes "
            f"with torchrun, or unset {' and '.join(given)} to train in a single process."
        )
    return _read_number(environment, "RANK")


def _read_number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"the environment sets {name}={text!r}, which is not a number. Start the processes with torchrun, or unset {name} "
            "to train in a single process."
        )
    return int(text)
