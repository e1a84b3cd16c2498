"""The device that `fgoffload plan` plans for, of the table, of a file or of a profile, and what its memory is enough for."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.errors import ConfigError, PlanError
from fgoffload.transfer_config import HOST_SHARE
from fgoffload.units import format_bytes

if TYPE_CHECKING:
    from fgoffload.planner.ranks.rank_model import RankModel
    from fgoffload.planner.timing.hardware import Hardware
    from fgoffload.planner.timing.profile import Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """What ranks run on."""

    hardware: "Hardware | None"
    """Of the table or of a file, with the link of `profile` where there is one; None where that is of a training."""
    profile: "Profile | None"
    """What was measured: of a training, or the link alone."""
    link_line: str = ""
    """Where the link comes from, if that is not where the rest does."""

    def find_node(self) -> "Hardware | None":
        """Return what the devices of a node are, as far as the table knows the one that a training was profiled on."""
        from fgoffload.planner.timing.hardware import get_hardware

        if self.hardware is not None or self.profile is None:
            return self.hardware
        try:
            return get_hardware(self.profile.device)
        except ConfigError:
            return None  # a CPU, or a device of a file of its user's

    def use_link(self, ranks: "Sequence[RankModel]") -> "tuple[RankModel, ...]":
        """Return `ranks`, which were built for `hardware`, with the link as it was measured: by size, and beside compute."""
        if self.profile is None:
            return tuple(ranks)
        link = self.profile.link.to_model()
        return tuple(dataclasses.replace(rank, link=link) for rank in ranks)


def check_device(options: argparse.Namespace, example: str) -> None:
    """Refuse two devices, and none. Whether a profile says all of one is known when it is read.

    Args:
        options: What the parser found.
        example: A whole command line.

    Raises:
        ConfigError: With the flags and the fix.
    """
    if options.gpu is not None and options.hardware is not None:
        raise ConfigError("--gpu and --hardware both say what device it is. Give one of them.")
    if options.gpu is options.hardware is options.profile is None:
        raise ConfigError(f"--gpu is missing. Give it, as in --gpu h100; or --hardware, or --profile. All: {example}.")


def find_device(gpu: str | None, hardware: Path | None, profile: Path | None) -> PlannedDevice:
    """Return the device that three flags say together.

    Args:
        gpu: A name of the table, as typed.
        hardware: A file of hardware. Of `gpu` and this one is None.
        profile: A file of a profile. One of a training says all of its device; one of the link alone says that of it.

    Raises:
        ConfigError: A file cannot be read, no device has such a name, or the three say too much or too little.
    """
    if profile is None:
        return PlannedDevice(hardware=_read_hardware(gpu, hardware), profile=None)
    from fgoffload.planner.timing.profile import Profile

    measured = Profile.load(profile)
    if measured.ranks:
        if gpu is not None or hardware is not None:
            raise ConfigError(
                f"--{'gpu' if hardware is None else 'hardware'} and --profile {profile}, which is of a training, both say what "
                "device it is. Give one of them."
            )
        return PlannedDevice(hardware=None, profile=measured)
    is_named = gpu is not None or hardware is not None
    device = _read_hardware(gpu, hardware) if is_named else _find_measured_device(measured, profile)
    device = _replace_link(device, measured)
    link = measured.link.to_model()
    line = (
        f"Link: as {profile} says, measured on {measured.device}, {measured.date}: {link.d2h_bytes_per_s / 1e9:.1f} GB/s to "
        f"the host, {link.h2d_bytes_per_s / 1e9:.1f} to the device, {link.duplex_bytes_per_s / 1e9:.1f} each way at once, "
        f"{link.copy_latency_s * 1e6:.1f} us before each copy. All else is that of {device.name}."
    )
    return PlannedDevice(hardware=device, profile=measured, link_line=line)


def _find_measured_device(profile: "Profile", path: Path) -> "Hardware":
    """Return the device of the table on which a link was measured.

    Raises:
        ConfigError: It is none of them.
    """
    from fgoffload.planner.timing.hardware import get_hardware

    try:
        return get_hardware(profile.device)
    except ConfigError as error:
        raise ConfigError(
            f"--profile {path} has the link alone, of {profile.device!r}, which is no device of the table: memory and rates "
            "are not in it. Give the device too, as in --gpu h100, or measure a model: fgoffload profile ARGUMENTS.sh."
        ) from error


def _replace_link(hardware: "Hardware", profile: "Profile") -> "Hardware":
    from fgoffload.planner.timing.hardware import Link

    rates = profile.link.copies[-1]
    ways = (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s)
    link = Link(
        d2h_bytes_per_s=ways[0],
        h2d_bytes_per_s=ways[1],
        # Measured apart, it can come out a bit above the slower way alone.
        duplex_bytes_per_s=min(rates.duplex_bytes_per_s, *ways),
        is_measured=True,
    )
    return dataclasses.replace(hardware, link=link)


def _read_hardware(gpu: str | None, path: Path | None) -> "Hardware":
    from fgoffload.planner.timing.hardware import HARDWARE, Hardware, get_hardware

    if path is not None:
        return Hardware.load(path)
    try:
        return get_hardware(str(gpu))
    except ConfigError as error:
        known, _, _ = str(error).removeprefix("hardware ").partition(" Give one of:")
        raise ConfigError(
            f"--gpu {known} Give one of: {', '.join(HARDWARE)}; or a file of your own: --hardware FILE."
        ) from error


def choose_budget(given_bytes: int | None, hardware: "Hardware | None") -> int:
    """Return the device bytes of each rank: those that were given, or all that the device has.

    Args:
        given_bytes: Of `--offload-memory-budget`; None without.
        hardware: The device; None where a profile of a training stands in its place.

    Raises:
        ConfigError: The device has less, or nobody says what it has.
    """
    if given_bytes is not None:
        if hardware is not None and given_bytes > hardware.device_memory_bytes:
            raise ConfigError(
                f"--offload-memory-budget {format_bytes(given_bytes)} is more than the memory of {hardware.name}, "
                f"{format_bytes(hardware.device_memory_bytes)}. Give that or less, or leave it out; or name a larger device."
            )
        return given_bytes
    if hardware is None:
        raise ConfigError("--offload-memory-budget is missing, and a profile does not say it. Give it, as in 76GiB.")
    return hardware.device_memory_bytes


def choose_host_budget(given_bytes: int | None, hardware: "Hardware | None", world_size: int) -> tuple[int | None, str]:
    """Return the host bytes of a rank, None for no limit, and where they come from.

    Where none are given it is what the engine takes of a node with nothing else on it: a part of all, shared by the ranks.
    """
    from fgoffload.planner.model_ranks import count_ranks_per_node

    words = "" if given_bytes is None else f"{format_bytes(given_bytes)} a rank, as given"
    if hardware is None or hardware.host_memory_bytes_per_node is None:
        return given_bytes, words or "no limit, since what a node has is not known; --offload-host-budget SIZE gives one"
    node_bytes, ranks = hardware.host_memory_bytes_per_node, count_ranks_per_node(hardware, world_size)
    if given_bytes is not None:
        if given_bytes * ranks > node_bytes:
            words += f", which is more than the {format_bytes(node_bytes)} of a node for all {ranks} of them"
        return given_bytes, words
    budget_bytes = int(node_bytes * HOST_SHARE / ranks)
    return budget_bytes, (
        f"{format_bytes(budget_bytes)} a rank, {HOST_SHARE:.0%} of the {format_bytes(node_bytes)} of a node over "
        f"{ranks} rank{'s' if ranks > 1 else ''}; a training takes that part of what is free then"
    )


def check_static(
    ranks: "Sequence[RankModel]", budget_bytes: int | None, hardware: "Hardware", *, typed_reserve_bytes: int | None
) -> None:
    """Refuse a model of which a device has no room for what is always there: no search finds a plan for that.

    A sweep, whose budget is None, is told what the largest budget lacks: all that the device has.

    Args:
        ranks: All pipeline ranks.
        budget_bytes: Of each device; None where there are many.
        hardware: The device.
        typed_reserve_bytes: Of `--reserve`; None where it was not given.

    Raises:
        PlanError: With what is lacking, and the fix.
    """
    from fgoffload.planner.solving.solver import describe_static_lack

    memory_bytes = hardware.device_memory_bytes
    if describe_static_lack(ranks, memory_bytes) is not None:
        lacking = describe_static_lack(ranks, memory_bytes if budget_bytes is None else budget_bytes)
        raise PlanError(describe_too_small(str(lacking), hardware, typed_reserve_bytes))


def describe_too_small(why: str, hardware: "Hardware", typed_reserve_bytes: int | None) -> str:
    """Return why no budget of a device is enough: the one that is would be refused."""
    less = f"lower --reserve {format_bytes(typed_reserve_bytes)}, " if typed_reserve_bytes else ""
    return (
        f"{why} {hardware.name} has {format_bytes(hardware.device_memory_bytes)} in all: {less}spread the model over more "
        "ranks, or name a larger device."
    )
