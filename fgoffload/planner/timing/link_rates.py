"""The simulator's model of the link between device and host, from the table of hardware or a file.

An unmeasured link is assumed to reach the share of its nominal rate that an H100 with PCIe 5 reached of its 64 GB/s.
"""

from fgoffload.errors import ConfigError
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.timing.hardware import Hardware, Link

_NAMED_BYTES_PER_S = 64e9

D2H_SHARE = 47e9 / _NAMED_BYTES_PER_S
"""Fraction of the nominal rate that copies to the host reach. Source: 47 to 55 GB/s, measured on one H100; the lowest, so that
no plan expects more of an unmeasured link."""

H2D_SHARE = 53e9 / _NAMED_BYTES_PER_S
"""Fraction of the nominal rate that copies to the device reach. Source: 53 GB/s, on the same H100."""

DUPLEX_SHARE = 33.5e9 / 47e9
"""Rate of each direction while both run, as a part of the slower one alone. Source: 33.5 GB/s each way, on the same H100."""

COPY_LATENCY_S = 5e-6
"""Seconds before the bytes of a copy move. Source: copies of 64 KiB ran at 9.7 GB/s on the same H100, 6.8 us each. The bytes
take 1.3 us of that at the rate of large copies. Copies of 256 KiB ran at 36 GB/s and lost 2 us."""

COMPUTE_SLOWDOWN = 0.01
"""Fraction by which copies slow the compute of a training; a safe estimate. A matrix product that fills the device for long
takes 3 to 7% longer (measured on an H100 and H200s). The kernels of a step do not: all kernels of W2 took 559.6 ms without
copies, and 545.8, 550.7 and 557.5 ms beside 233 ms of copies (traces on an H200). Memory-bound kernels took 0.3% longer."""


def make_link_model(hardware: Hardware) -> LinkModel:
    """Return the simulator's model of the link of `hardware`.

    Measured rates count in full, nominal rates in part. If the rate of both directions at once was not measured, it is a part
    of the slower direction's rate.
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
    # Nominal rates of both directions at once equal those of one alone, so they say no more than the slower direction alone.
    if link.is_measured and link.duplex_bytes_per_s is not None:
        return link.duplex_bytes_per_s
    return slower * DUPLEX_SHARE


def _get_rate(hardware: Hardware, field: str) -> float:
    rate: float | None = getattr(hardware.link, field)
    if rate is None:
        raise ConfigError(
            f"hardware {hardware.name!r} has no {field} of its link, and copies need it. "
            "Measure it with `fgoffload doctor`, and give a hardware file that has it, or a profile."
        )
    return rate
