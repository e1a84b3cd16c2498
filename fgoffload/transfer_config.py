"""How tensors move, for those who name modules or saved tensors of their own instead of Megatron flags."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.transfer_schedule import DEFAULT_PREFETCH_BYTES, DEFAULT_WINDOW_BYTES, HostMemory, TransferPolicy
from fgoffload.units import MIB, check_bytes

DEFAULT_MIN_OFFLOADED_BYTES = 1 * MIB
"""Bytes. Small copies waste the link: it gives 36 GB/s at 256 KiB and 9.7 GB/s at 64 KiB, against 50 for large ones (measured,
H100, PCIe 5)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """What may leave, how far copies run behind forward and ahead of backward, and where the bytes go."""

    enabled: bool = True
    """False leaves everything as if it had not been asked for: no hooks on tensors, no host memory, no warnings."""
    min_offloaded_bytes: int = DEFAULT_MIN_OFFLOADED_BYTES
    """What all saves of one storage cover together stays on the device when it is smaller. 0 lets all leave."""
    window_bytes: int | None = None
    """The most bytes on their way to the host before compute has to wait. None derives it; see `derive_policy`."""
    prefetch_bytes: int | None = None
    """The most bytes back on the device before backward asks for them. None derives it; see `derive_policy`."""
    host_budget_bytes: int | None = None
    """The most host bytes of this rank; what does not fit stays on the device. None takes a share of what the machine has."""
    host_memory: HostMemory = HostMemory.PINNED
    """Pinned is faster; pageable where the limit of locked memory is low."""
    is_timed: bool = False
    """Measure copies, and what compute waits, for `stats()`: a few events more for each group, and `stats()` waits for them."""
    keep: Callable[[Any], bool] | None = None
    """Your own filter: a saved `torch.Tensor` for which it returns true stays. Asked for each saved tensor that could leave."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: With the field, the value, the limit and the fix.
        """
        for name in ("enabled", "is_timed"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} {getattr(self, name)!r} is neither True nor False. Give one of them.")
        self._check_sizes()
        if not isinstance(self.host_memory, HostMemory):
            raise ConfigError(f"host_memory {self.host_memory!r} is not a HostMemory. Give HostMemory.PINNED or .PAGEABLE.")
        if self.keep is not None and not callable(self.keep):
            raise ConfigError(f"keep {self.keep!r} cannot be called. Give a function of a tensor that returns true to keep it.")

    def derive_policy(self, *, offloaded_bytes: int | None = None, largest_group_bytes: int = 0) -> TransferPolicy:
        """Return the rules of window and prefetch.

        A size that is None becomes a quarter of what is offloaded, but no less than one group and no more than the default:
        one group is always on its way while the one before it is used, and three quarters of a small model's activations are
        off the device at its peak.

        Args:
            offloaded_bytes: The most that was on the host at once; None before the first forward, when the defaults serve.
            largest_group_bytes: Of the last forward.
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
            "min_offloaded_bytes": "0 lets all leave",
            "window_bytes": "0 lets compute wait for each copy",
            "prefetch_bytes": "0 brings nothing back in advance",
        }
        for name, zero in zeros.items():
            size_bytes = getattr(self, name)
            may_be_none = name != "min_offloaded_bytes"
            if not (may_be_none and size_bytes is None) and check_bytes(size_bytes, name=name) < 0:
                raise ConfigError(f"{name} {size_bytes} is below 0. Give bytes; {zero}.")
        budget_bytes = self.host_budget_bytes
        if budget_bytes is not None and check_bytes(budget_bytes, name="host_budget_bytes") <= 0:
            raise ConfigError(
                f"host_budget_bytes {budget_bytes} leaves no host memory. Give bytes, or None for a share of it all."
            )
