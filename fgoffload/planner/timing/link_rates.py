"""The link between device and host as the simulator has it, from the table of hardware or a file.

A link that nobody measured is taken as the makers of others turned out: what an H100 with PCIe 5 reached of its 64 GB/s.
"""

import math

from fgoffload.errors import ConfigError
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.timing.hardware import Hardware, Link

_NAMED_BYTES_PER_S = 64e9

D2H_SHARE = 47e9 / _NAMED_BYTES_PER_S
"""Of the maker's rate, to the host. Source: 47 to 55 GB/s, measured on one H100; the least, so that no plan counts on more of a
link that nobody measured."""

H2D_SHARE = 53e9 / _NAMED_BYTES_PER_S
"""Of the maker's rate, to the device. Source: 53 GB/s, on the same H100."""

DUPLEX_SHARE = 33.5e9 / 47e9
"""Of the slower way alone, each way while both run. Source: 33.5 GB/s each way, on the same H100."""

COPY_LATENCY_S = 5e-6
"""Seconds before the bytes of a copy move. Source: copies of 64 KiB ran at 9.7 GB/s on the same H100, 6.8 us each, of which the
bytes are 1.3 at the rate of large copies; those of 256 KiB at 36 GB/s lost 2."""

COMPUTE_SLOWDOWN = 0.01
"""What compute of a training takes longer beside copies, as a part; on the safe side. A matrix product that fills the device
for long takes 3 to 7% longer (measured on an H100 and H200s), but not the kernels of a step: those of W2 took 559.6 ms together
without copies, and 545.8, 550.7 and 557.5 with 233 ms of copies beside them (traces on an H200). What is bound by memory took
0.3% longer."""


def make_link_model(
    hardware: Hardware, *, copy_latency_s: float = COPY_LATENCY_S, compute_slowdown: float = COMPUTE_SLOWDOWN
) -> LinkModel:
    """Return the link of `hardware` as the simulator has it.

    Rates that were measured count as they are, and those of makers in part. Where nobody measured both ways at once, a part of
    the slower way counts.

    Args:
        hardware: With its link.
        copy_latency_s: Seconds before the bytes of a copy move.
        compute_slowdown: What compute takes longer beside copies, as a part.

    Raises:
        ConfigError: Of the link something is not known, or an argument is below 0.
    """
    for name, value in (("copy_latency_s", copy_latency_s), ("compute_slowdown", compute_slowdown)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} {value} is not from 0 on and finite. Give such a number, or leave it out.")
    link = hardware.link
    d2h = _get_rate(hardware, "d2h_bytes_per_s") * (1.0 if link.is_measured else D2H_SHARE)
    h2d = _get_rate(hardware, "h2d_bytes_per_s") * (1.0 if link.is_measured else H2D_SHARE)
    return LinkModel(
        d2h_bytes_per_s=d2h,
        h2d_bytes_per_s=h2d,
        duplex_bytes_per_s=_find_duplex(link, slower=min(d2h, h2d)),
        copy_latency_s=copy_latency_s,
        compute_slowdown=compute_slowdown,
    )


def _find_duplex(link: Link, *, slower: float) -> float:
    # A maker names both ways at once as each alone: that is no more than the slower way alone is worth here.
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
