"""Computes transfer rates between ranks, as fractions of nominal rates.

If the hardware lacks a rate, we assume a common one; `describe_assumed_rates` reports the assumptions.
"""

import dataclasses

from fgoffload.planner.timing.efficiency import Efficiency
from fgoffload.planner.timing.hardware import Hardware

ASSUMED_NETWORK_BYTES_PER_S = 50e9
"""Network rate of each device if the hardware lists none: one 400 Gbit/s card each, as in vendors' systems since the H100."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRates:
    """Bytes per second that a rank reaches, in each direction."""

    domain_ranks: int  # number of ranks in an NVLink domain, which communicate without the network
    nvlink_bytes_per_s: float  # rate to all other ranks of the domain together
    peer_bytes_per_s: float | None  # rate to one other rank of the domain; None if it can be all of `nvlink_bytes_per_s`
    network_bytes_per_s: float  # rate to ranks of other domains

    def get_nvlink_rate(self, ranks: int) -> float:
        """Return a rank's rate in a group of `ranks` ranks of one domain. Without a switch, it uses only its links to them."""
        if self.peer_bytes_per_s is None:
            return self.nvlink_bytes_per_s
        return min(self.nvlink_bytes_per_s, self.peer_bytes_per_s * max(1, ranks - 1))


def make_network_rates(hardware: Hardware, efficiency: Efficiency) -> NetworkRates:
    """Return the rates that collectives reach between ranks."""
    far = (hardware.network_bytes_per_s or ASSUMED_NETWORK_BYTES_PER_S) * efficiency.network
    near, peer = hardware.nvlink_bytes_per_s or _find_pcie_rate(hardware), hardware.nvlink_peer_bytes_per_s
    return NetworkRates(
        domain_ranks=hardware.nvlink_gpus or hardware.gpus_per_node,
        nvlink_bytes_per_s=far if near is None else near * efficiency.nvlink,
        peer_bytes_per_s=None if peer is None else peer * efficiency.nvlink,
        network_bytes_per_s=far,
    )


def describe_assumed_rates(hardware: Hardware, *, ranks: int) -> str | None:
    """Return one line with the missing rates of `hardware` and the values assumed for them, or None if all are known.

    Omit the NVLink rate if no two ranks share a domain, and the network rate if all ranks do.
    """
    domain = hardware.nvlink_gpus or hardware.gpus_per_node
    assumed = []
    if not hardware.link.is_measured:
        assumed.append("measured link to the host (assuming a fraction of the vendor's rate)")
    if hardware.nvlink_bytes_per_s is None and min(ranks, domain) > 1:
        pcie = _find_pcie_rate(hardware)
        rate = "the network's rate" if pcie is None else f"{pcie / 1e9:.0f} GB/s, as over PCIe"
        assumed.append(f"nvlink_bytes_per_s (assuming {rate})")
    if hardware.network_bytes_per_s is None and ranks > domain:
        assumed.append(f"network_bytes_per_s (assuming {ASSUMED_NETWORK_BYTES_PER_S / 1e9:.0f} GB/s)")
    if not assumed:
        return None
    lacking = " and no ".join(assumed)
    return f"hardware {hardware.name!r} has no {lacking}. To set rates, use a hardware file: docs/reference/hardware.md."


def _find_pcie_rate(hardware: Hardware) -> float | None:
    rates = [rate for rate in (hardware.link.d2h_bytes_per_s, hardware.link.h2d_bytes_per_s) if rate is not None]
    return min(rates, default=None)
