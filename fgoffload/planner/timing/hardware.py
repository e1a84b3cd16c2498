"""Device specifications (memory, peak rates, link to the host), from the built-in table or a file.

    >>> get_hardware("h100").name
    'H100 80GB SXM'

Rates are the vendor's dense peaks, which models do not reach. None means that the vendor does not publish the figure. Load any
other device, or a measured one, from a file with `Hardware.load(path)`; docs/reference/hardware.md has an example.
"""

import dataclasses
import difflib
import json
import re
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
    """Copy rates between one device and its host, for large copies. Rates are decimal: 50 GB/s is 50e9."""

    d2h_bytes_per_s: float | None = None  # bytes per second to the host, with no copies to the device
    h2d_bytes_per_s: float | None = None  # bytes per second to the device, with no copies to the host
    duplex_bytes_per_s: float | None = None  # bytes per second in each direction while both are busy
    is_measured: bool = False
    """Whether these rates were measured. Otherwise they are nominal rates, which copies do not reach: on an H100 they
    reached 47 to 55 of 64 GB/s."""

    def __post_init__(self) -> None:
        for name in _LINK_RATES:
            check_rate(name, getattr(self, name))
        alone = [rate for rate in (self.d2h_bytes_per_s, self.h2d_bytes_per_s) if rate is not None]
        if self.duplex_bytes_per_s is not None and alone and self.duplex_bytes_per_s > min(alone):
            raise ConfigError(
                f"duplex_bytes_per_s {self.duplex_bytes_per_s:g} is above {min(alone):g}, the rate of the slower "
                "direction alone. Use the rate per direction while both are busy, or at most the slower rate."
            )
        if not isinstance(self.is_measured, bool):
            raise ConfigError(f"is_measured {self.is_measured!r} must be true or false.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, its link to the host, and its node."""

    name: str  # name in tables
    device_memory_bytes: int
    """Device memory as the vendor labels it, read in binary units: "80 GB" is 80 GiB. It includes the memory that the driver
    reserves: torch reports 178.35 of a B200's 180 GiB, and 60.97 of an Ascend 910B's 64 GiB."""
    device_memory_bytes_per_s: float | None = None  # device memory bandwidth, in bytes per second
    memory_efficiency: float | None = None
    """Measured fraction of the memory bandwidth that kernels reach, above 0 and at most 1. `Efficiency.memory` overrides it."""
    compute_efficiency: float = 1.0  # efficiency of matrix products and attention, relative to Hopper (`Efficiency`)
    bf16_flop_per_s: float | None = None
    """Dense bf16 FLOP per second. fp16 runs at the same rate on all devices in the table."""
    fp8_flop_per_s: float | None = None  # dense fp8 FLOP per second; also None on devices without fp8
    tf32_flop_per_s: float | None = None  # dense FLOP per second of fp32 matrix products in tf32
    link: Link = dataclasses.field(default_factory=Link)  # link to the host
    nvlink_bytes_per_s: float | None = None
    """Total bytes per second from a device to the rest of its domain, one way, over NVLink or AMD's Infinity Fabric. If None
    (no such link, or no published rate), devices in a node send over PCIe, at the rate of the slower direction of `link`."""
    nvlink_peer_bytes_per_s: float | None = None
    """Bytes per second to one other device, if links connect pairs of devices without a switch. In a group of n, a device
    reaches n - 1 times this rate. If None, it can send to any one device at `nvlink_bytes_per_s`."""
    nvlink_gpus: int | None = None  # devices in an NVLink domain; defaults to `gpus_per_node`
    network_bytes_per_s: float | None = None
    """Bytes per second of a device's share of its node's network cards, one way, in the vendor's own system. None if servers
    differ; the planner then assumes 50 GB/s, one 400 Gbit/s card per device."""
    host_memory_bytes_per_node: int | None = None  # host memory of a node in the vendor's own system; None if servers differ
    gpus_per_node: int  # devices that share the host's memory
    source: str  # sources of the figures

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text.strip():
                raise ConfigError(f"{name} {text!r} must be a non-empty string.")
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

    @classmethod
    def from_json(cls, text: str, *, source: str) -> "Hardware":
        """Parse the description of a device.

        Args:
            text: A JSON object with the fields of this class. Memory is in bytes or a size like "80GiB"; `link` is an object
                with the fields of `Link`. Optional fields may be null or missing. `"base": "gb200"` fills in missing
                fields from the built-in GB200 entry. It also completes a partial `link`, except for the duplex rate.
            source: Where `text` comes from, for error messages.

        Raises:
            ConfigError: `text` is not JSON, or a field is unknown, missing or invalid.
        """
        return _make_hardware(parse_json(text, name=source, fix="Use an object with the fields of Hardware."), source=source)

    @classmethod
    def load(cls, path: Path) -> "Hardware":
        """Load the description of a device from the file at `path`."""
        source = f"hardware file {path}"
        return cls.from_json(read_text_file(path, name=source, fix="Pass the path of a JSON file."), source=source)


def get_hardware(name: str) -> Hardware:
    """Look up a built-in device by any of its names, such as `h100`, `H100 80GB SXM` or the driver's name.

    Case, spaces and dashes do not matter.

    Raises:
        ConfigError: The device is not in the built-in table. The message suggests the closest name, if any.
    """
    if (found := find_hardware(name)) is not None:
        return found
    nearest = difflib.get_close_matches(_strip(name), _NAMES, n=1, cutoff=0.6)
    hint = f" Did you mean {_NAMES[nearest[0]]!r}?" if nearest else ""
    raise ConfigError(
        f"hardware {name!r} is not known.{hint} Use one of: {', '.join(HARDWARE)}; or load your own file with Hardware.load."
    )


def find_hardware(name: str) -> Hardware | None:
    """Look up a built-in device like `get_hardware`, but return None if the name is unknown."""
    key = _NAMES.get(_strip(name))
    return None if key is None else HARDWARE[key]


def check_for_times(hardware: Hardware) -> None:
    """Reject a device without the figures that every plan needs: memory bandwidth, bf16 rate and link rates."""
    if not isinstance(hardware, Hardware):
        raise ConfigError(f'hardware {repr(hardware)[:60]} is not a Hardware. Use get_hardware("h100") or Hardware.load(path).')
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
        f"hardware {hardware.name!r} has no {', '.join([*missing, *(f'link.{name}' for name in of_link)])}, which no "
        f"public source lists. Pass a file with your device's figures to --hardware, for example {{{', '.join(example)}}}, "
        "or use --profile."
    )


def get_rate(rates: Hardware | Link, field: str, name: str) -> float:
    """Return a rate of the device `name` or of its link. Raise a ConfigError if the rate is unknown."""
    rate: float | None = getattr(rates, field)
    if rate is None:
        raise ConfigError(
            f"hardware {name!r} has no {field}, which predictions need. Pass a file with it to --hardware, or use --profile."
        )
    return rate


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

_NEEDED = ("device_memory_bytes_per_s", "bf16_flop_per_s")
_LINK_NEEDED = ("d2h_bytes_per_s", "h2d_bytes_per_s")


def _make_hardware(document: Any, *, source: str) -> Hardware:
    """Build a device from parsed JSON. Errors begin with `source`."""
    try:
        return _convert_fields(check_fields(Hardware, _fill_from_base(document, source), "hardware"))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _convert_fields(fields: dict[str, Any]) -> Hardware:
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
    """Fill in the missing fields of `document` from the device in its field `base`, if it has one."""
    if not isinstance(document, dict) or "base" not in document:
        return document
    base = get_hardware(str(document["base"]))
    own = {key: value for key, value in document.items() if key != "base"}
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    if "device_memory_bytes_per_s" in own:
        fields["memory_efficiency"] = None  # measured relative to the base's bandwidth
    if isinstance(own.get("link"), dict):
        # The duplex rate was measured with the base's other rates. With new rates it is unknown.
        own["link"] = {**dataclasses.asdict(base.link), "duplex_bytes_per_s": None, **own["link"]}
    return {**fields, "source": f"{base.source} {', '.join(own)}: {source}." if own else base.source, **own}


def _strip(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _load_table(table: str) -> None:
    """Load the built-in devices. Each device must come after its `base`, and no two devices may share a name."""
    for key, fields in json.loads(table).items():
        source = f"hardware.json, device {key!r}"
        driver_name = fields.pop("driver", key)
        HARDWARE[key] = _make_hardware(fields, source=source)
        for name in (key, HARDWARE[key].name, driver_name):
            if (other := _NAMES.setdefault(_strip(name), key)) != key:
                raise ConfigError(f"{source}: name or driver {name!r} is also a name of {other!r}. Use another name.")


HARDWARE: dict[str, Hardware] = {}
"""Devices of hardware.json, keyed by the name that users type."""
_NAMES: dict[str, str] = {}
"""Normalized names of devices, including those that drivers report, mapped to keys of `HARDWARE`."""
_load_table(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
