"""Builds the simulator's link model from hardware specifications.

An unmeasured link is assumed to reach the same fraction of its nominal rate as an H100 with PCIe 5 reached of its 64 GB/s.
"""

from fgoffload.errors import ConfigError
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.timing.hardware import Hardware, Link

_NAMED_BYTES_PER_S = 64e9

D2H_SHARE = 47e9 / _NAMED_BYTES_PER_S
"""Fraction of the nominal rate that copies to the host reach. Source: 47 to 55 GB/s, measured on one H100. We use the lowest,
so that no plan relies on a faster link."""

H2D_SHARE = 53e9 / _NAMED_BYTES_PER_S
"""Fraction of the nominal rate that copies to the device reach. Source: 53 GB/s, on the same H100."""

DUPLEX_SHARE = 33.5e9 / 47e9
"""Rate per direction while both are busy, relative to the slower one alone. Source: 33.5 GB/s each way, on the same H100."""

COPY_LATENCY_S = 5e-6
"""Seconds before the first byte of a copy moves. Source: copies of 64 KiB ran at 9.7 GB/s on the same H100, 6.8 us each.
At the rate of large copies their bytes take 1.3 us of that. Copies of 256 KiB ran at 36 GB/s, with 2 us of latency."""

COMPUTE_SLOWDOWN = 0.01
"""Fraction by which copies slow the compute of a step; a conservative estimate. A long matrix product that fills the device
takes 3 to 7% longer (measured on an H100 and H200s). The kernels of a step do not: all kernels of W2 took 559.6 ms without
copies, and 545.8, 550.7 and 557.5 ms beside 233 ms of copies (traces on an H200). Memory-bound kernels took 0.3% longer."""


def make_link_model(hardware: Hardware) -> LinkModel:
    """Return the simulator's model of the link of `hardware`.

    Measured rates are used as they are, nominal rates are derated. If the duplex rate was not measured, it is estimated as a
    fraction of the slower direction's rate.
    """
    link = hardware.link
    d2h = _get_rate(hardware, "d2h_bytes_per_s") * (1.0 if link.is_measured else D2H_SHARE)
    h2d = _get_rate(hardware, "h2d_bytes_per_s") * (1.0 if link.is_measured else H2D_SHARE)
    return LinkModel(
        d2h_bytes_per_s=d2h,
        h2d_bytes_per_s=h2d,
        duplex_bytes_per_s=_find_duplex(link, slower=min(d2h, h2d)),
        copy_latency_s=COPY_LATENCY_S,
        compute_slowdown=COMPUTE_SLOWDOWN,
    )


def _find_duplex(link: Link, *, slower: float) -> float:
    # Nominal duplex rates equal those of one direction alone, so they add no information.
    if link.is_measured and link.duplex_bytes_per_s is not None:
        return link.duplex_bytes_per_s
    return slower * DUPLEX_SHARE


def _get_rate(hardware: Hardware, field: str) -> float:
    rate: float | None = getattr(hardware.link, field)
    if rate is None:
        raise ConfigError(
            f"hardware {hardware.name!r} has no link rate {field}, which copies need. "
            "Measure it with `fgoffload doctor`, and give a hardware file that has it, or a profile."
        )
    return rate
