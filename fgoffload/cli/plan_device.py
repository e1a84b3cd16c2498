"""Finds the device to plan for, and the memory budgets of each rank."""

import dataclasses
from typing import TYPE_CHECKING

from fgoffload.errors import ConfigError
from fgoffload.transfer_config import HOST_SHARE
from fgoffload.units import format_bytes

if TYPE_CHECKING:
    from fgoffload.cli.plan_options import PlanOptions
    from fgoffload.planner.timing.hardware import Hardware
    from fgoffload.planner.timing.profile import Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """The device to plan for. All ranks use the same device."""

    hardware: "Hardware | None"
    """Hardware from the table or a file, with link rates from `profile` if given. None if `profile` is from a training run."""
    profile: "Profile | None"
    """A profile of a training run, or only of the link."""
    link_line: str = ""
    """Description of the link if `profile` contains only link measurements, otherwise empty."""


def find_device(checked: "PlanOptions") -> PlannedDevice:
    """Return the device from the hardware table, a hardware file, or a profile."""
    from fgoffload.planner.timing.profile import Profile

    if checked.profile is None:
        return PlannedDevice(hardware=_read_hardware(checked, None), profile=None)
    measured = Profile.load(checked.profile)
    if measured.ranks:
        if checked.gpu is not None or checked.hardware is not None:
            raise ConfigError(
                f"--{'gpu' if checked.hardware is None else 'hardware'} and --profile {checked.profile} both set the device, "
                "since the profile is from a training run. Use only one of them."
            )
        return PlannedDevice(hardware=None, profile=measured)
    device = _replace_link(_read_hardware(checked, measured), measured)
    link = measured.link.to_model()
    line = (
        f"Link: from {checked.profile}, measured on {measured.device}, {measured.date}: {link.d2h_bytes_per_s / 1e9:.1f} GB/s "
        f"to the host, {link.h2d_bytes_per_s / 1e9:.1f} to the device, {link.duplex_bytes_per_s / 1e9:.1f} each way when both "
        f"are in use. All other properties are those of {device.name}."
    )
    return PlannedDevice(hardware=device, profile=measured, link_line=line)


def _replace_link(hardware: "Hardware", profile: "Profile") -> "Hardware":
    from fgoffload.planner.timing.hardware import Link

    rates = profile.link.copies[-1]
    d2h_bytes_per_s, h2d_bytes_per_s = rates.d2h_bytes_per_s, rates.h2d_bytes_per_s
    link = Link(
        d2h_bytes_per_s=d2h_bytes_per_s,
        h2d_bytes_per_s=h2d_bytes_per_s,
        # The duplex rate is measured separately, so it may slightly exceed the slower direction's rate.
        duplex_bytes_per_s=min(rates.duplex_bytes_per_s, d2h_bytes_per_s, h2d_bytes_per_s),
        is_measured=True,
    )
    return dataclasses.replace(hardware, link=link)


def _read_hardware(checked: "PlanOptions", measured: "Profile | None") -> "Hardware":
    """Return the hardware that the options select. By default, it is the device on which the link was measured."""
    from fgoffload.planner.timing.hardware import Hardware, get_hardware

    if checked.hardware is not None:
        return Hardware.load(checked.hardware)
    try:
        return get_hardware(measured.device if checked.gpu is None and measured is not None else str(checked.gpu))
    except ConfigError as error:
        if checked.gpu is None and measured is not None:
            raise ConfigError(
                f"--profile {checked.profile} has only link rates, measured on {measured.device!r}, which is not in the "
                "hardware table. Add the device, for example --gpu h100, or profile a model: fgoffload profile ARGUMENTS.sh."
            ) from error
        known, _, _ = str(error).removeprefix("hardware ").partition("; or ")  # the rest of the message is about the Python API
        raise ConfigError(f"--gpu {known}; or describe your own device with --hardware FILE.") from error


def choose_budget(given_bytes: int | None, hardware: "Hardware | None") -> int:
    """Return the memory budget of each rank: `given_bytes`, or all of the device's memory.

    Raises:
        ConfigError: The budget exceeds the device's memory, or it is missing and that memory is unknown.
    """
    if given_bytes is not None:
        if hardware is not None and given_bytes > hardware.device_memory_bytes:
            raise ConfigError(
                f"--offload-memory-budget {format_bytes(given_bytes)} is more than the memory of {hardware.name}, "
                f"{format_bytes(hardware.device_memory_bytes)}. Use at most that, omit the flag, or use a larger device."
            )
        return given_bytes
    if hardware is None:
        raise ConfigError(
            "--offload-memory-budget is missing. --profile requires it, for example: --offload-memory-budget 76GiB."
        )
    return hardware.device_memory_bytes


def choose_host_budget(given_bytes: int | None, hardware: "Hardware | None", world_size: int) -> tuple[int | None, str]:
    """Return the host budget of a rank, or None for no limit, and a description of its source.

    The default equals the engine's default on an idle node: a share of the node's memory, divided among its ranks.
    """
    from fgoffload.planner.model_ranks import count_ranks_per_node

    source = "" if given_bytes is None else f"{format_bytes(given_bytes)} per rank, from the command line"
    if hardware is None or hardware.host_memory_bytes_per_node is None:
        return given_bytes, source or "no limit, since the node's memory is unknown; --offload-host-budget SIZE sets one"
    node_bytes, ranks = hardware.host_memory_bytes_per_node, count_ranks_per_node(hardware, world_size)
    if given_bytes is not None:
        if given_bytes * ranks > node_bytes:
            source += f"; all {ranks} ranks of a node together exceed its {format_bytes(node_bytes)}"
        return given_bytes, source
    budget_bytes = int(node_bytes * HOST_SHARE / ranks)
    share = f" divided by {ranks} ranks" if ranks > 1 else ""
    return budget_bytes, (
        f"{format_bytes(budget_bytes)} per rank, {HOST_SHARE:.0%} of a node's {format_bytes(node_bytes)}{share}; "
        "a training run uses the same share of the memory that is free when it starts"
    )
