"""The device that `fgoffload plan` plans for: from the table, a file or a profile."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.errors import ConfigError, PlanError
from fgoffload.transfer_config import HOST_SHARE
from fgoffload.units import format_bytes

if TYPE_CHECKING:
    from fgoffload.cli.plan_options import PlanOptions
    from fgoffload.planner.ranks.rank_model import RankModel
    from fgoffload.planner.timing.hardware import Hardware
    from fgoffload.planner.timing.profile import Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """The device of all ranks."""

    hardware: "Hardware | None"
    """Hardware from the table or a file, with the link of `profile` if given. None if `profile` is of a training run."""
    profile: "Profile | None"
    """The profile of a training run, or of the link alone."""
    link_line: str = ""
    """Source of the link, if it differs from the source of the device."""

    def find_node(self) -> "Hardware | None":
        """Return the hardware of a node's devices, or None if a training run was profiled on a device outside the table."""
        from fgoffload.planner.timing.hardware import get_hardware

        if self.hardware is not None or self.profile is None:
            return self.hardware
        try:
            return get_hardware(self.profile.device)
        except ConfigError:
            return None  # a CPU, or a device from the user's file


def find_device(checked: "PlanOptions") -> PlannedDevice:
    """Return the device of the table, a hardware file, or a profile of a training run. A link profile has only the link.

    Raises:
        ConfigError: A file cannot be read, the name is unknown, or the flags name two devices.
    """
    from fgoffload.planner.host_overhead import HostGuess
    from fgoffload.planner.timing.profile import Profile

    gpu, hardware, profile = checked.gpu, checked.hardware, checked.profile
    if profile is None:
        return PlannedDevice(hardware=_read_hardware(gpu, hardware), profile=None)
    measured = Profile.load(profile)
    if measured.ranks:
        if gpu is not None or hardware is not None:
            raise ConfigError(
                f"--{'gpu' if hardware is None else 'hardware'} and --profile {profile}, which is of a training run, both name "
                "the device. Give one of them."
            )
        return PlannedDevice(hardware=None, profile=measured)
    device = _replace_link(_read_hardware(gpu, hardware, measured, profile), measured)
    if checked.host is HostGuess.IN_TIME:
        raise ConfigError("--not-launch-bound is the default with a profile of the link alone. Leave it out.")
    link = measured.link.to_model()
    line = (
        f"Link: from {profile}, measured on {measured.device}, {measured.date}: {link.d2h_bytes_per_s / 1e9:.1f} GB/s to the "
        f"host, {link.h2d_bytes_per_s / 1e9:.1f} to the device, {link.duplex_bytes_per_s / 1e9:.1f} each way at once, "
        f"{link.copy_latency_s * 1e6:.1f} us before each copy. Everything else comes from {device.name}."
    )
    return PlannedDevice(hardware=device, profile=measured, link_line=line)


def _replace_link(hardware: "Hardware", profile: "Profile") -> "Hardware":
    from fgoffload.planner.timing.hardware import Link

    rates = profile.link.copies[-1]
    ways = (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s)
    link = Link(
        d2h_bytes_per_s=ways[0],
        h2d_bytes_per_s=ways[1],
        # Measured separately, the duplex rate can exceed the slower direction a bit.
        duplex_bytes_per_s=min(rates.duplex_bytes_per_s, *ways),
        is_measured=True,
    )
    return dataclasses.replace(hardware, link=link)


def _read_hardware(
    gpu: str | None, path: Path | None, measured: "Profile | None" = None, profile: Path | None = None
) -> "Hardware":
    """Return the named device, or else the one on which the link of `profile` was measured."""
    from fgoffload.planner.timing.hardware import HARDWARE, Hardware, get_hardware

    if path is not None:
        return Hardware.load(path)
    try:
        return get_hardware(measured.device if gpu is None and measured is not None else str(gpu))
    except ConfigError as error:
        if gpu is None and measured is not None:
            raise ConfigError(
                f"--profile {profile} has only the link, measured on {measured.device!r}, which is not in the hardware table. "
                "Give the device too, as in --gpu h100, or measure a model: fgoffload profile ARGUMENTS.sh."
            ) from error
        known, _, _ = str(error).removeprefix("hardware ").partition(" Give one of:")
        raise ConfigError(f"--gpu {known} Give one of: {', '.join(HARDWARE)}; or your own device: --hardware FILE.") from error


def choose_budget(given_bytes: int | None, hardware: "Hardware | None") -> int:
    """Return the memory budget of each rank: the given one, or all of the device's memory.

    Raises:
        ConfigError: The device has less memory, or a profile of a training run takes its place.
    """
    if given_bytes is not None:
        if hardware is not None and given_bytes > hardware.device_memory_bytes:
            raise ConfigError(
                f"--offload-memory-budget {format_bytes(given_bytes)} is more than the memory of {hardware.name}, "
                f"{format_bytes(hardware.device_memory_bytes)}. Give that or less, leave it out, or name a larger device."
            )
        return given_bytes
    if hardware is None:
        raise ConfigError("--offload-memory-budget is missing, and a profile has none. Give it, as in 76GiB.")
    return hardware.device_memory_bytes


def choose_host_budget(given_bytes: int | None, hardware: "Hardware | None", world_size: int) -> tuple[int | None, str]:
    """Return the host budget of a rank, or None for no limit, and its source.

    The default is what the engine takes on an otherwise empty node: a part of its memory, shared by the ranks.
    """
    from fgoffload.planner.model_ranks import count_ranks_per_node

    words = "" if given_bytes is None else f"{format_bytes(given_bytes)} a rank, from the command line"
    if hardware is None or hardware.host_memory_bytes_per_node is None:
        return given_bytes, words or "no limit, since the node's memory is unknown; --offload-host-budget SIZE sets one"
    node_bytes, ranks = hardware.host_memory_bytes_per_node, count_ranks_per_node(hardware, world_size)
    if given_bytes is not None:
        if given_bytes * ranks > node_bytes:
            words += f"; all {ranks} ranks of a node together exceed its {format_bytes(node_bytes)}"
        return given_bytes, words
    budget_bytes = int(node_bytes * HOST_SHARE / ranks)
    return budget_bytes, (
        f"{format_bytes(budget_bytes)} a rank, {HOST_SHARE:.0%} of a node's {format_bytes(node_bytes)} over {ranks} "
        f"rank{'s' if ranks > 1 else ''}; a training run takes the same share of the memory that is free at its start"
    )


def check_static(
    ranks: "Sequence[RankModel]", budget_bytes: int | None, hardware: "Hardware", *, typed_reserve_bytes: int | None
) -> None:
    """Refuse a model whose static memory exceeds the device: no plan can help. A sweep has no budget.

    Raises:
        PlanError: The model does not fit; with the fix.
    """
    from fgoffload.planner.solving.solver import describe_static_lack

    memory_bytes = hardware.device_memory_bytes
    if describe_static_lack(ranks, memory_bytes) is not None:
        lacking = describe_static_lack(ranks, memory_bytes if budget_bytes is None else budget_bytes)
        raise PlanError(describe_too_small(str(lacking), hardware, typed_reserve_bytes))


def describe_too_small(why: str, hardware: "Hardware", typed_reserve_bytes: int | None) -> str:
    """Return why no budget of the device is enough."""
    less = f"lower --reserve {format_bytes(typed_reserve_bytes)}, " if typed_reserve_bytes else ""
    return (
        f"{why} {hardware.name} has {format_bytes(hardware.device_memory_bytes)} in all: {less}spread the model over more "
        "ranks, or name a larger device."
    )
