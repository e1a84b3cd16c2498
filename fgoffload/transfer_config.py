"""Offload options for plain PyTorch and Hugging Face."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from fgoffload.defaults import DEFAULT_PREFETCH_BYTES, DEFAULT_WINDOW_BYTES
from fgoffload.errors import ConfigError
from fgoffload.transfer_schedule import TransferPolicy
from fgoffload.units import MIB, check_bytes

DEFAULT_MIN_OFFLOADED_BYTES = 1 * MIB
"""Small copies are slow: 36 GB/s at 256 KiB and 9.7 GB/s at 64 KiB, but 50 GB/s for large copies (H100, PCIe 5)."""

HOST_SHARE = 0.6
"""Default fraction of host memory that all ranks of a node may use together. The engine applies it to the memory that is free
when it starts, and the planner to the node's total memory. The rest is for data loaders, checkpoints and the page cache."""


class HostMemory(enum.Enum):
    """Kind of host memory that holds offloaded bytes."""

    PINNED = "pinned"  # copies run at the link's rate and overlap compute
    PAGEABLE = "pageable"  # copies are slower and block the CPU, but the OS may swap the memory out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Offload options: which tensors to offload, when to copy them, and which host memory to use.

    Args:
        enabled: False disables offload: no hooks, no host memory, no warnings.
        min_offloaded_bytes: Storages with fewer saved bytes stay on the GPU. 0 offloads storages of any size.
        window_bytes: Bytes that may be in flight to the host before compute waits. By default, see `derive_policy`.
        prefetch_bytes: Bytes that may be reloaded before backward needs them. By default, see `derive_policy`.
        host_budget_bytes: Limit on this process's host memory. By default, the processes of a node share 60% of the
            node's free memory equally. Tensors that do not fit stay on the GPU.
        host_memory: Kind of host memory. Use pageable memory, which is slower, if pinning fails.
        is_timed: Whether to time copies and waits for `stats()`. The engine then records a few more events per group, and
            `stats()` waits for these events.
        keep: Function that is called with each tensor that could be offloaded. If it returns true, the tensor stays on the GPU.
    """

    enabled: bool = True
    min_offloaded_bytes: int = DEFAULT_MIN_OFFLOADED_BYTES
    window_bytes: int | None = None
    prefetch_bytes: int | None = None
    host_budget_bytes: int | None = None
    host_memory: HostMemory = HostMemory.PINNED
    is_timed: bool = False
    keep: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        """Check every field. Error messages give the field, the value, the limit and the fix."""
        for name in ("enabled", "is_timed"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} {getattr(self, name)!r} is not a bool. Use True or False.")
        self._check_sizes()
        if not isinstance(self.host_memory, HostMemory):
            raise ConfigError(f"host_memory {self.host_memory!r} is not a HostMemory. Use HostMemory.PINNED or .PAGEABLE.")
        if self.keep is not None and not callable(self.keep):
            raise ConfigError(f"keep {self.keep!r} is not callable. Pass a function that returns true to keep a tensor.")

    def derive_policy(self, *, offloaded_bytes: int | None = None, largest_group_bytes: int = 0) -> TransferPolicy:
        """Return the window and prefetch sizes.

        A size of None becomes a quarter of the offloaded bytes, limited to the default, but at least the largest group. So at
        least one group is prefetched, and the window and prefetch of a small model do not use up its savings.

        Args:
            offloaded_bytes: Peak bytes on the host. None (before the first forward) selects the defaults.
            largest_group_bytes: Size of the largest group in the last forward.
        """

        def derive(given_bytes: int | None, default_bytes: int) -> int:
            if given_bytes is not None:
                return given_bytes
            if offloaded_bytes is None:
                return default_bytes
            return max(largest_group_bytes, min(default_bytes, offloaded_bytes // 4))

        return TransferPolicy(
            window_bytes=derive(self.window_bytes, DEFAULT_WINDOW_BYTES),
            prefetch_bytes=derive(self.prefetch_bytes, DEFAULT_PREFETCH_BYTES),
        )

    def _check_sizes(self) -> None:
        zeros = {
            "min_offloaded_bytes": "0 offloads storages of any size",
            "window_bytes": "0 makes compute wait for each copy",
            "prefetch_bytes": "0 disables prefetch",
        }
        for name, zero in zeros.items():
            size_bytes = getattr(self, name)
            may_be_none = name != "min_offloaded_bytes"
            if not (may_be_none and size_bytes is None) and check_bytes(size_bytes, name=name) < 0:
                raise ConfigError(f"{name} {size_bytes} is below 0. Use 0 or more bytes; {zero}.")
        budget_bytes = self.host_budget_bytes
        if budget_bytes is not None and check_bytes(budget_bytes, name="host_budget_bytes") <= 0:
            raise ConfigError(
                f"host_budget_bytes {budget_bytes} leaves no host memory. Pass a higher limit, or None for the default."
            )
