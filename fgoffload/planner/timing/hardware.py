"""Devices: memory, rates and the link to the host, from the table or a file.

    >>> get_hardware("h100").name
    'H100 80GB SXM'

Rates are dense peaks from the maker; models reach less. None means not public. Another device, or one that was measured, comes
from a file: `Hardware.load(path)`; docs/reference/hardware.md has an example.
"""

import dataclasses
import difflib
import itertools
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count, check_device_rate, check_part, check_rate
from fgoffload.planner.timing.efficiency import ASSUMED_MEMORY
from fgoffload.planner.timing.json_fields import check_fields
from fgoffload.text_files import parse_json, read_text_file
from fgoffload.units import parse_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link between the memories of one device and its host, for large copies. Rates are decimal: 50 GB/s is 50e9."""

    d2h_bytes_per_s: float | None = None  # bytes a second to the host alone
    h2d_bytes_per_s: float | None = None  # bytes a second to the device alone
    duplex_bytes_per_s: float | None = None  # bytes a second of each direction while both run
    is_measured: bool = False
    """Whether copies were measured at these rates. Else they are the maker's, which copies do not reach: of an H100's 64 GB/s
    they reached 47 to 55."""

    def __post_init__(self) -> None:
        """Refuse impossible rates."""
        for name in _LINK_RATES:
            check_rate(name, getattr(self, name))
        ways = [rate for rate in (self.d2h_bytes_per_s, self.h2d_bytes_per_s) if rate is not None]
        if self.duplex_bytes_per_s is not None and ways and self.duplex_bytes_per_s > min(ways):
            raise ConfigError(
                f"duplex_bytes_per_s {self.duplex_bytes_per_s:g} is above {min(ways):g}, the slower way alone. It is the rate "
                "of each way while both run: give as much or less."
            )
        if not isinstance(self.is_measured, bool):
            raise ConfigError(f"is_measured {self.is_measured!r} is neither true nor false. Give one of them.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, its link to the host, and its node."""

    name: str  # name in tables
    device_memory_bytes: int
    """Device memory as its maker names it, in binary units: "80 GB" is 80 GiB. The driver's share is not subtracted: torch
    sees 178.35 of a B200's 180 GiB, and 60.97 of an Ascend 910B's 64."""
    device_memory_bytes_per_s: float | None = None  # bandwidth of that memory, bytes a second
    memory_efficiency: float | None = None
    """Measured part of that bandwidth that the kernels of a step reach, above 0 and at most 1. None takes
    `Efficiency.memory`."""
    compute_efficiency: float = 1.0  # efficiency of matrix products and attention, relative to Hopper's (`Efficiency`)
    bf16_flop_per_s: float | None = None
    """Dense floating-point operations a second in bf16; fp16 has the same rate on all devices of the table."""
    fp8_flop_per_s: float | None = None  # dense operations a second in fp8; None also on devices without fp8
    tf32_flop_per_s: float | None = None  # dense operations a second of fp32 matrix products in tf32
    link: Link = dataclasses.field(default_factory=Link)  # link to the host
    nvlink_bytes_per_s: float | None = None
    """Bytes a second from a device to all others of its domain together, one way: over NVLink, or AMD's Infinity Fabric. None
    if there is none or it is not public: then devices of a node send over PCIe, at the slower direction of `link`."""
    nvlink_peer_bytes_per_s: float | None = None
    """Bytes a second to one other device, if devices are wired in pairs without a switch: a group of n reaches n - 1 times
    this. None takes all of `nvlink_bytes_per_s`."""
    nvlink_gpus: int | None = None  # devices of a domain; None takes those of a node
    network_bytes_per_s: float | None = None
    """Bytes a second of a device's share of its node's network cards, one way, in the maker's own system. None if
    servers differ: then 50 GB/s are taken, a card of 400 Gbit/s for each device."""
    host_memory_bytes_per_node: int | None = None  # host memory of a node of the maker's own system; None if servers differ
    gpus_per_node: int  # devices that share the host's memory
    source: str  # sources of the figures

    def __post_init__(self) -> None:
        """Refuse impossible figures."""
        for name in ("name", "source"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text.strip():
                raise ConfigError(f"{name} {text!r} is no text. Give some.")
        for name in ("device_memory_bytes", "gpus_per_node"):
            check_count(name, getattr(self, name))
        for name in ("host_memory_bytes_per_node", "nvlink_gpus"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in _RATES:
            check_rate(name, getattr(self, name))
        if self.memory_efficiency is not None:
            check_part("memory_efficiency", self.memory_efficiency, example=ASSUMED_MEMORY)
        check_part("compute_efficiency", self.compute_efficiency, example=1.0)
        if not isinstance(self.link, Link):
            raise ConfigError(f"link {self.link!r} is no link. Give a Link, or in a file an object with its fields.")

    @classmethod
    def from_json(cls, text: str, *, source: str) -> "Hardware":
        """Parse hardware.

        Args:
            text: A JSON object with the fields of this class. Memory is bytes or a size like "80GiB"; `link` is an object with
                the fields of `Link`. A field that may be None can be null or missing. `"base": "gb200"` takes missing fields
                from that device of the table; a `link` replaces all of its link.
            source: Origin of `text`, for the error.

        Raises:
            ConfigError: `text` is not JSON, or a field is unknown, missing or invalid.
        """
        document = parse_json(text, name=source, fix="Give an object with the fields of Hardware.")
        try:
            return _make_hardware(document, source=source)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> "Hardware":
        """Return the hardware in the file at `path`."""
        source = f"hardware file {path}"
        return cls.from_json(read_text_file(path, name=source, fix="Give the path of a JSON file."), source=source)


def get_hardware(name: str) -> Hardware:
    """Return the hardware of the table by any of its names: `h100`, `H100 80GB SXM` or the driver's, `NVIDIA H200`.

    Case, spaces and dashes do not matter.

    Raises:
        ConfigError: `name` is no text, or the table has no such hardware, with the nearest name.
    """
    if not isinstance(name, str):
        raise ConfigError(f'hardware {repr(name)[:60]} is no text. Give the name of a device, as in get_hardware("h100").')
    if (found := _NAMES.get(_strip(name))) is not None:
        return HARDWARE[found]
    nearest = _find_nearest(_strip(name), _NAMES)
    hint = f" Did you mean {_NAMES[nearest]!r}?" if nearest else ""
    raise ConfigError(
        f"hardware {name!r} is not known.{hint} Give one of: {', '.join(HARDWARE)}; or a file of your own to Hardware.load."
    )


def _find_nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is similar to `name`, contains it, as for `910b`, or is a part of it; None without one."""
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    parts = (one for one in known if len(name) >= _SHORTEST_PART and (name in one or one in name))
    return next(itertools.chain(similar, parts), None)


def check_for_times(hardware: Hardware) -> None:
    """Refuse a device that lacks a figure that every plan needs: bandwidth, operations and the link."""
    if not isinstance(hardware, Hardware):
        raise ConfigError(
            f'hardware {repr(hardware)[:60]} is no Hardware. Give one, as get_hardware("h100") or Hardware.load(path).'
        )
    missing = [name for name in _NEEDED if getattr(hardware, name) is None]
    of_link = [name for name in _LINK_NEEDED if getattr(hardware.link, name) is None]
    if not missing and not of_link:
        return
    base = [f'"base": "{key}"' for key, one in HARDWARE.items() if one.name == hardware.name]
    example = [*base, *(f'"{name}": 1e12' for name in missing)]
    if of_link:
        rates = ", ".join(f'"{name}": 25e9' for name in of_link)
        example.append(f'"link": {{{rates}}}')
    raise ConfigError(
        f"hardware {hardware.name!r} has no {', '.join([*missing, *(f'link.{name}' for name in of_link)])}, and no public "
        f"source gives it. Give --hardware a file with what your device has, as in {{{', '.join(example)}}}, or --profile."
    )


_RATES = (
    "device_memory_bytes_per_s",
    "bf16_flop_per_s",
    "fp8_flop_per_s",
    "tf32_flop_per_s",
    "nvlink_bytes_per_s",
    "nvlink_peer_bytes_per_s",
    "network_bytes_per_s",
)
_LINK_RATES = ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s")
_SHORTEST_PART = 3  # characters from which a part of a name identifies a device

_NEEDED = ("device_memory_bytes_per_s", "bf16_flop_per_s")
_LINK_NEEDED = ("d2h_bytes_per_s", "h2d_bytes_per_s")


def _make_hardware(document: Any, *, source: str) -> Hardware:
    fields = check_fields(Hardware, _fill_from_base(document, source), "hardware")
    for name in ("device_memory_bytes", "host_memory_bytes_per_node"):
        if isinstance(fields.get(name), str):
            fields[name] = parse_bytes(fields[name], name=name, needs_unit=True)
    if fields.get("link") is None:
        fields["link"] = {}
    if not isinstance(fields["link"], Link):
        fields["link"] = Link(**check_fields(Link, fields["link"], "link"))
    for name in _RATES:
        check_device_rate(name, fields.get(name))
    for name in _LINK_RATES:
        check_device_rate(name, getattr(fields["link"], name))
    return Hardware(**fields)


def _fill_from_base(document: Any, source: str) -> Any:
    """Return `document` with the missing fields of the device that its `base` names, if it has one."""
    if not isinstance(document, dict) or "base" not in document:
        return document
    name = document["base"]
    if not isinstance(name, str):
        raise ConfigError(f'base {name!r} is no text. Give a device of the table, as in "h100".')
    base = get_hardware(name)
    own = {key: value for key, value in document.items() if key != "base"}
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    if "device_memory_bytes_per_s" in own:
        fields["memory_efficiency"] = None  # measured with the other bandwidth
    if isinstance(own.get("link"), dict):
        # The duplex rate belongs to the measured link: with other rates it is unknown.
        own["link"] = {**dataclasses.asdict(base.link), "duplex_bytes_per_s": None, **own["link"]}
    return {**fields, "source": f"{base.source} {', '.join(own) or 'nothing'}: {source}.", **own}


def _strip(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _load_table() -> None:
    """Read the devices of the package. A device's `base` comes before it in the file."""
    table = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    for key, fields in json.loads(table).items():
        driver_name = fields.pop("driver", key)
        HARDWARE[key] = _make_hardware(fields, source=f"device {key}")
        _NAMES.update({_strip(name): key for name in (key, HARDWARE[key].name, driver_name)})


HARDWARE: dict[str, Hardware] = {}
"""Devices of hardware.json, by the name that users type."""
_NAMES: dict[str, str] = {}
"""Keys of `HARDWARE` by all names of users and drivers, stripped. A PCIe card of the same chip is another device."""
_load_table()
