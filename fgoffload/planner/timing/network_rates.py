"""How fast ranks send to each other: what the makers name, in the part that collectives reach, or what somebody measured.

A device of which the table does not say it is taken as others are; `describe_assumed_rates` tells what was taken.
"""

import dataclasses

from fgoffload.planner.timing.efficiency import Efficiency, Network
from fgoffload.planner.timing.hardware import Hardware

ASSUMED_NETWORK_BYTES_PER_S = 50e9
"""Of each device, where the hardware does not say: a card of 400 Gbit/s for each, as in the makers' systems since the H100."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRates:
    """Bytes a second that a rank reaches, each way."""

    domain_ranks: int
    """Ranks that reach each other without the network."""
    nvlink_bytes_per_s: float
    """To all others of its domain together."""
    peer_bytes_per_s: float | None
    """To one other of its domain. None is all of `nvlink_bytes_per_s`."""
    network_bytes_per_s: float
    """To ranks of other domains."""

    def get_nvlink_rate(self, ranks: int) -> float:
        """Return what a rank of a group of `ranks` within the domain reaches: without a switch, the links to those alone."""
        if self.peer_bytes_per_s is None:
            return self.nvlink_bytes_per_s
        return min(self.nvlink_bytes_per_s, self.peer_bytes_per_s * max(1, ranks - 1))


def make_network_rates(hardware: Hardware, network: Network, efficiency: Efficiency) -> NetworkRates:
    """Return the rates between ranks.

    Args:
        hardware: With what its maker names.
        network: What was measured, which counts as it is; what it leaves out is the hardware's.
        efficiency: The part of the hardware's rates that collectives reach.
    """
    far = network.network_bytes_per_s
    if far is None:
        far = (hardware.network_bytes_per_s or ASSUMED_NETWORK_BYTES_PER_S) * efficiency.network
    near, peer = network.nvlink_bytes_per_s, None
    if near is None:
        named = hardware.nvlink_bytes_per_s or _find_pcie_rate(hardware)
        near = far if named is None else named * efficiency.nvlink
        if hardware.nvlink_peer_bytes_per_s is not None:
            peer = hardware.nvlink_peer_bytes_per_s * efficiency.nvlink
    domain_ranks = network.nvlink_ranks or hardware.nvlink_gpus or hardware.gpus_per_node
    return NetworkRates(domain_ranks=domain_ranks, nvlink_bytes_per_s=near, peer_bytes_per_s=peer, network_bytes_per_s=far)


def describe_assumed_rates(hardware: Hardware, *, ranks: int, is_network_measured: bool) -> str | None:
    """Return one line with the rates of `hardware` that nobody measured or named and what was taken; None without any.

    Args:
        hardware: What each rank runs on.
        ranks: Of the training. One sends nothing, and those of one domain need no network.
        is_network_measured: The rates between ranks were measured, so that those of the hardware do not count.
    """
    domain = hardware.nvlink_gpus or hardware.gpus_per_node
    taken = []
    if not hardware.link.is_measured:
        taken.append("measured link to the host (part of the maker's rate is taken)")
    if not is_network_measured and hardware.nvlink_bytes_per_s is None and min(ranks, domain) > 1:
        pcie = _find_pcie_rate(hardware)
        rate = "that of the network" if pcie is None else f"{pcie / 1e9:.0f} GB/s, as over PCIe,"
        taken.append(f"nvlink_bytes_per_s ({rate} is taken)")
    if not is_network_measured and hardware.network_bytes_per_s is None and ranks > domain:
        taken.append(f"network_bytes_per_s ({ASSUMED_NETWORK_BYTES_PER_S / 1e9:.0f} GB/s is taken)")
    if not taken:
        return None
    lacking = " and no ".join(taken)
    return f"hardware {hardware.name!r} has no {lacking}. A hardware file can give it: docs/reference/hardware.md."


def _find_pcie_rate(hardware: Hardware) -> float | None:
    rates = [rate for rate in (hardware.link.d2h_bytes_per_s, hardware.link.h2d_bytes_per_s) if rate is not None]
    return min(rates, default=None)
