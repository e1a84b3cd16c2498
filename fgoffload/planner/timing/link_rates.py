"""Builds the simulator's link model from hardware specifications.

We assume that an unmeasured link reaches the same fraction of its nominal rate as an H100's PCIe 5 link, nominally 64 GB/s.
"""

from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.timing.hardware import Hardware, get_rate

_NOMINAL_BYTES_PER_S = 64e9

D2H_SHARE = 47e9 / _NOMINAL_BYTES_PER_S
"""Fraction of the nominal rate that copies to the host reach. Source: the lowest of 47 to 55 GB/s measured on one H100."""

H2D_SHARE = 53e9 / _NOMINAL_BYTES_PER_S
"""Fraction of the nominal rate that copies to the device reach. Source: 53 GB/s, on the same H100."""

DUPLEX_SHARE = 33.5e9 / 47e9
"""Rate per direction while both are busy, relative to the slower direction alone. Source: 33.5 GB/s on the same H100."""

COPY_LATENCY_S = 5e-6
"""Seconds before the first byte of a copy moves. Source: copies of 64 KiB ran at 9.7 GB/s on the same H100, 6.8 us each. At the
rate of large copies they would take 1.3 us."""

COMPUTE_SLOWDOWN = 0.01
"""Fraction by which copies slow down the compute of a step; a conservative estimate. Source: in traces of W2 on an H200, copies
do not slow down kernels. On an H100 and H200s, copies slow down a long matrix product that fills the GPU by 3 to 7%."""


def make_link_model(hardware: Hardware) -> LinkModel:
    """Return the simulator's model of the link of `hardware`.

    Nominal rates are multiplied by the fractions above, and measured rates are not. If the duplex rate was not measured, it is
    estimated as a fraction of the slower direction's rate.
    """
    link = hardware.link
    d2h = get_rate(link, "d2h_bytes_per_s", hardware.name) * (1.0 if link.is_measured else D2H_SHARE)
    h2d = get_rate(link, "h2d_bytes_per_s", hardware.name) * (1.0 if link.is_measured else H2D_SHARE)
    # Nominal duplex rates equal the rates of one direction alone, so they add no information.
    duplex = link.duplex_bytes_per_s if link.is_measured else None
    return LinkModel(
        d2h_bytes_per_s=d2h,
        h2d_bytes_per_s=h2d,
        duplex_bytes_per_s=min(d2h, h2d) * DUPLEX_SHARE if duplex is None else duplex,
        copy_latency_s=COPY_LATENCY_S,
        compute_slowdown=COMPUTE_SLOWDOWN,
    )
