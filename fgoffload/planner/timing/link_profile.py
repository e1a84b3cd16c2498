"""Measurements of the link between a device and its host: copy rates by size, and how much copies slow a matrix product."""

import dataclasses

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count, check_device_rate
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.timing.link_rates import COMPUTE_SLOWDOWN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyRate:
    """Rates between a device and its host for copies of one size. Rates are decimal: 50 GB/s is 50e9."""

    size_bytes: int  # bytes of each copy
    d2h_bytes_per_s: float  # rate to the host, with no copies to the device
    h2d_bytes_per_s: float  # rate to the device, with no copies to the host
    duplex_bytes_per_s: float  # rate per direction while both are busy: the slower of the two

    def __post_init__(self) -> None:
        check_count("size_bytes", self.size_bytes)
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s"):
            check_device_rate(name, getattr(self, name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """Measured link between a device and its host."""

    copies: tuple[CopyRate, ...]  # copy rates, from the smallest size to the largest
    compute_slowdown: float  # fraction by which copies in both directions slow down a matrix product: 0.06 for 6%

    def __post_init__(self) -> None:
        if not self.copies:
            raise ConfigError("copies is empty: the link was not measured. Measure again.")
        sizes = [copy.size_bytes for copy in self.copies]
        if sizes != sorted(set(sizes)):
            raise ConfigError(f"copies have sizes {sizes}, in bytes. List each size once, from the smallest to the largest.")

    def to_model(self) -> LinkModel:
        """Return the simulator's model of the link: rates of the largest copies, and latency from the smallest.

        A copy of n bytes takes latency + n / rate. Latency is negligible for large copies and dominates small ones.
        """
        largest, smallest = self.copies[-1], self.copies[0]
        d2h_s = smallest.size_bytes / smallest.d2h_bytes_per_s - smallest.size_bytes / largest.d2h_bytes_per_s
        h2d_s = smallest.size_bytes / smallest.h2d_bytes_per_s - smallest.size_bytes / largest.h2d_bytes_per_s
        return LinkModel(
            d2h_bytes_per_s=largest.d2h_bytes_per_s,
            h2d_bytes_per_s=largest.h2d_bytes_per_s,
            duplex_bytes_per_s=largest.duplex_bytes_per_s,
            copy_latency_s=max(0.0, (d2h_s + h2d_s) / 2),
            # Copies slow a step's kernels less: the measured matrix product keeps the whole device busy for longer.
            compute_slowdown=min(self.compute_slowdown, COMPUTE_SLOWDOWN),
        )
