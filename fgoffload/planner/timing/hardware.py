"""What a training runs on: memory, rates and the link to the host, of known devices or of one's own.

    >>> get_hardware("h100").name
    'H100 80GB SXM'

Rates are peaks, dense, from the maker; what a model reaches of them is less. None stands for what is not public. A device that
is not in the table, or one that was measured, comes from a file: `Hardware.load(path)`; docs/reference/hardware.md has
an example.
"""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import check_count, check_device_rate, check_part, check_rate
from fgoffload.planner.timing.efficiency import ASSUMED_MEMORY
from fgoffload.text_files import parse_json, read_text_file
from fgoffload.units import GIB, TIB, parse_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between the memory of one device and that of its host, for large copies. Rates are decimal: 50 GB/s is 50e9."""

    d2h_bytes_per_s: float | None = None
    """Bytes a second to the host, with nothing the other way."""
    h2d_bytes_per_s: float | None = None
    """Bytes a second to the device, with nothing the other way."""
    duplex_bytes_per_s: float | None = None
    """Bytes a second each way while both run."""
    is_measured: bool = False
    """Copies ran at these rates. Else they are the maker's, which copies do not reach: an H100's 64 GB/s gave 47 to 55."""

    def __post_init__(self) -> None:
        """Refuse what is no rate.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
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
    """One device, its link to the host, and the node that it is in."""

    name: str
    """For people."""
    device_memory_bytes: int
    """Of the device, as its maker names it, in binary units: "80 GB" is 80 GiB. What the driver keeps is not taken off: torch
    sees 178.35 of a B200's 180 GiB, and 60.97 of an Ascend 910B's 64."""
    device_memory_bytes_per_s: float | None = None
    """Bandwidth of that memory, bytes a second."""
    memory_efficiency: float | None = None
    """The part of that bandwidth that the kernels of a step reach, above 0 and at most 1, where it was measured. None is what
    others are taken to reach (`Efficiency.memory`)."""
    bf16_flop_per_s: float | None = None
    """Dense floating-point operations a second in bf16, and in fp16, which has the same rate on all devices of the table."""
    fp8_flop_per_s: float | None = None
    """Dense, in fp8. None on devices without fp8, too."""
    tf32_flop_per_s: float | None = None
    """Dense, of matrix products of fp32 tensors in tf32."""
    link: Link = dataclasses.field(default_factory=Link)
    """To the host."""
    nvlink_bytes_per_s: float | None = None
    """Bytes a second that a device sends to all others of its domain together, one way: over NVLink, or AMD's Infinity Fabric.
    None where there is no such thing, or where it is not public: then devices of a node are taken to send over PCIe, at the
    slower way of `link`."""
    nvlink_peer_bytes_per_s: float | None = None
    """To one other device, where they are wired in pairs and not through a switch: a group of n reaches n - 1 times this. None
    is all of `nvlink_bytes_per_s`."""
    nvlink_gpus: int | None = None
    """Devices of such a domain. None is those of a node."""
    network_bytes_per_s: float | None = None
    """Bytes a second of a device's share of its node's network cards, one way, in the maker's own system. None where each
    server has its own: then 50 GB/s are taken, which is a card of 400 Gbit/s for each device."""
    host_memory_bytes_per_node: int | None = None
    """Of the maker's own system, all devices of the node together. None where each server has its own."""
    gpus_per_node: int
    """Devices that share the host's memory."""
    source: str
    """Where the figures come from."""

    def __post_init__(self) -> None:
        """Refuse what no device has.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
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
        if not isinstance(self.link, Link):
            raise ConfigError(f"link {self.link!r} is no link. Give a Link, or in a file an object with its fields.")

    @classmethod
    def from_json(cls, text: str, *, source: str) -> "Hardware":
        """Return the hardware that `text` holds.

        Args:
            text: A JSON object with the fields of this class. Memory is bytes or a size like "80GiB"; `link` is an object with
                the fields of `Link`. A field that may be None can be null or left out. `"base": "gb200"` takes what the object
                leaves out from that device of the table; a `link` replaces all of its link.
            source: Where `text` came from, for the error.

        Raises:
            ConfigError: `text` is not JSON, or a field is unknown, missing or not what it must be.
        """
        document = parse_json(text, name=source, fix="Give an object with the fields of Hardware.")
        try:
            fields = _read_fields(cls, _fill_from_base(document, source), "hardware")
            for name in ("device_memory_bytes", "host_memory_bytes_per_node"):
                if isinstance(fields.get(name), str):
                    fields[name] = parse_bytes(fields[name], name=name, needs_unit=True)
            if fields.get("link") is None:
                fields["link"] = {}
            if not isinstance(fields["link"], Link):
                fields["link"] = Link(**_read_fields(Link, fields["link"], "link"))
            for name in _RATES:
                check_device_rate(name, fields.get(name))
            for name in _LINK_RATES:
                check_device_rate(name, getattr(fields["link"], name))
            return cls(**fields)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> "Hardware":
        """Return the hardware in the file at `path`.

        Raises:
            ConfigError: The file cannot be read, or holds no hardware.
        """
        source = f"hardware file {path}"
        return cls.from_json(read_text_file(path, name=source, fix="Give the path of a JSON file."), source=source)


def get_hardware(name: str) -> Hardware:
    """Return the hardware of the table that `name` means: `h100`, `H100 80GB SXM` or, as its driver says, `NVIDIA H200`.

    Case, spaces and dashes do not matter.

    Raises:
        ConfigError: `name` is no text, or the table has no such hardware, with the nearest name.
    """
    if not isinstance(name, str):
        raise ConfigError(f'hardware {repr(name)[:60]} is no text. Give the name of a device, as in get_hardware("h100").')
    names = {_strip(key): key for key in HARDWARE} | {_strip(one.name): key for key, one in HARDWARE.items()}
    by_driver = {_strip(driver_name): key for driver_name, key in _DRIVER_NAMES.items()}
    found = (names | by_driver).get(_strip(name))
    if found is not None:
        return HARDWARE[found]
    nearest = _find_nearest(_strip(name), names)
    hint = f" Did you mean {names[nearest]!r}?" if nearest else ""
    raise ConfigError(
        f"hardware {name!r} is not known.{hint} Give one of: {', '.join(HARDWARE)}; or a file of your own to Hardware.load."
    )


def _find_nearest(name: str, known: Collection[str]) -> str | None:
    """Return the name that `name` is like, or a part of, as `910b` is, or has as a part; None where there is none."""
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    parts = (one for one in known if len(name) >= _SHORTEST_PART and (name in one or one in name))
    return next(itertools.chain(similar, parts), None)


def check_for_times(hardware: Hardware) -> None:
    """Refuse a device of which something is not known that the times of every plan need: bandwidth, operations and the link.

    Raises:
        ConfigError: With all that is missing, and how to give it; or `hardware` is the name of one.
    """
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
_SHORTEST_PART = 3
"""Characters from which a part of a name says which device is meant."""

_DRIVER_NAMES: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA GH200 480GB": "gh200",
    "AMD Instinct MI300X": "mi300x",
}
"""What drivers call devices of the table, as profiles have it. Those of H100 and H200 were seen by us; a PCIe card of the same
chip has another name, and is none of these."""

_NEEDED = ("device_memory_bytes_per_s", "bf16_flop_per_s")
_LINK_NEEDED = ("d2h_bytes_per_s", "h2d_bytes_per_s")

_HOPPER: Mapping[str, Any] = {"bf16_flop_per_s": 989.4e12, "fp8_flop_per_s": 1978.9e12, "tf32_flop_per_s": 494.7e12}
_HOPPER_NODE: Mapping[str, Any] = {"nvlink_bytes_per_s": 450e9, "nvlink_gpus": 8, "network_bytes_per_s": 50e9}
_HOPPER_SOURCE = "rates: NVIDIA H100 Tensor Core GPU Architecture white paper (2022), H100 SXM5, without sparsity"
_HOPPER_NODE_SOURCE = (
    "NVLink 4, 900 GB/s, half of it each way, and a ConnectX-7 of 400 Gbit/s for each device: NVIDIA DGX H100/H200 User Guide "
    "(2025)"
)

HARDWARE: Mapping[str, Hardware] = {
    "a100": Hardware(
        name="A100 80GB SXM",
        device_memory_bytes=80 * GIB,
        device_memory_bytes_per_s=2039e9,
        bf16_flop_per_s=312e12,
        tf32_flop_per_s=156e12,
        link=Link(d2h_bytes_per_s=32e9, h2d_bytes_per_s=32e9, duplex_bytes_per_s=32e9),
        nvlink_bytes_per_s=300e9,
        nvlink_gpus=8,
        network_bytes_per_s=25e9,
        host_memory_bytes_per_node=2 * TIB,
        gpus_per_node=8,
        source="NVIDIA A100 Tensor Core GPU data sheet (2021): memory, rates, PCIe Gen4 64 GB/s, half of it each way; no fp8. "
        "NVLink 600 GB/s, half of it each way. NVIDIA DGX A100 data sheet (2021): node, in which 8 devices share NVSwitches, "
        "and 8 ConnectX-6 of 200 Gbit/s.",
    ),
    "h100": Hardware(
        name="H100 80GB SXM",
        device_memory_bytes=80 * GIB,
        device_memory_bytes_per_s=3.35e12,
        # What memory bounds in W2 takes 1.24 times as long as on an H200, which has 1.43 times the bandwidth: a quarter of
        # it, on strided tensors, takes 1.06 times as long.
        memory_efficiency=0.92,
        **_HOPPER,
        # Of sixteen profiles thirteen or more reach each: to the host 53.6 to 55.3 GB/s, back 48.0 to 55.2, both 38.2 to 48.9.
        link=Link(d2h_bytes_per_s=54e9, h2d_bytes_per_s=52e9, duplex_bytes_per_s=42e9, is_measured=True),
        **_HOPPER_NODE,
        host_memory_bytes_per_node=2 * TIB,
        gpus_per_node=8,
        source=f"NVIDIA H100 Tensor Core GPU data sheet (2023): memory; {_HOPPER_SOURCE}. What kernels reach of the memory's "
        "bandwidth: traces of W2 on an H100 and an H200 (docs/decisions.md). Link: sixteen profiles of H100s, pinned memory, "
        "PCIe 5 x16, copies of 256 MiB (docs/decisions.md). "
        f"NVIDIA DGX H100 data sheet (2023): node. {_HOPPER_NODE_SOURCE}.",
    ),
    "h200": Hardware(
        name="H200 141GB SXM",
        device_memory_bytes=141 * GIB,
        device_memory_bytes_per_s=4.8e12,
        **_HOPPER,
        link=Link(d2h_bytes_per_s=55.1e9, h2d_bytes_per_s=54.5e9, duplex_bytes_per_s=50.5e9, is_measured=True),
        **_HOPPER_NODE,
        host_memory_bytes_per_node=2 * TIB,
        gpus_per_node=8,
        source=f"NVIDIA H200 Tensor Core GPU data sheet (2024): memory; {_HOPPER_SOURCE}, the same as the H200's. Link "
        "measured on H200 hosts, each way with `fgoffload doctor` (docs/reference/tested.md), both at once with "
        "`fgoffload profile`, copies of 256 MiB. "
        f"NVIDIA DGX H200 data sheet (2024): node. {_HOPPER_NODE_SOURCE}.",
    ),
    "b200": Hardware(
        name="B200",
        device_memory_bytes=180 * GIB,
        device_memory_bytes_per_s=8e12,
        bf16_flop_per_s=2.25e15,
        fp8_flop_per_s=4.5e15,
        tf32_flop_per_s=1.1e15,
        link=Link(d2h_bytes_per_s=64e9, h2d_bytes_per_s=64e9, duplex_bytes_per_s=64e9),
        nvlink_bytes_per_s=900e9,
        nvlink_gpus=8,
        network_bytes_per_s=50e9,
        host_memory_bytes_per_node=2 * TIB,
        gpus_per_node=8,
        source="NVIDIA Blackwell Architecture Technical Brief (2024): bandwidth, and rates of HGX B200 without sparsity. "
        "NVIDIA DGX B200 User Guide (2025): an eighth of 1440 GB; the node, whose 2 TB can be made 4; its Xeon 8570 have PCIe "
        "5, of which x16 is 128 GB/s, half of it each way; NVLink 5, 1.8 TB/s, half of it each way; a ConnectX-7 of 400 Gbit/s "
        "for each device.",
    ),
    "gb200": Hardware(
        name="GB200",
        device_memory_bytes=186 * GIB,
        device_memory_bytes_per_s=8e12,
        bf16_flop_per_s=2.5e15,
        fp8_flop_per_s=5e15,
        tf32_flop_per_s=1.25e15,
        link=Link(d2h_bytes_per_s=225e9, h2d_bytes_per_s=225e9, duplex_bytes_per_s=225e9),
        nvlink_bytes_per_s=900e9,
        nvlink_gpus=72,
        network_bytes_per_s=50e9,
        host_memory_bytes_per_node=960 * GIB,
        gpus_per_node=4,
        source="NVIDIA GB200 NVL72 specifications (2024): half of a superchip's rates, without sparsity, and of its memory and "
        "bandwidth; 480 GB with each Grace, of which a node has 2. Link: NVLink-C2C of a Grace, 900 GB/s, half of it each way "
        "and shared by its 2 GPUs. What one GPU reaches alone is not public. NVLink 5 among 72 GPUs: 1.8 TB/s of each, half of "
        "it each way. NVIDIA DGX GB200 User Guide, networking (2025): 4 ConnectX-7 of 400 Gbit/s in a tray of 4 GPUs.",
    ),
    "gh200": Hardware(
        name="GH200 96GB",
        device_memory_bytes=96 * GIB,
        device_memory_bytes_per_s=4e12,
        **_HOPPER,
        link=Link(d2h_bytes_per_s=450e9, h2d_bytes_per_s=450e9, duplex_bytes_per_s=450e9),
        nvlink_bytes_per_s=450e9,
        nvlink_gpus=1,
        host_memory_bytes_per_node=480 * GIB,
        gpus_per_node=1,
        source=f"NVIDIA GH200 Grace Hopper Superchip data sheet (2023), with HBM3: memory of GPU and CPU, NVLink-C2C 900 GB/s, "
        f"half of it each way; {_HOPPER_SOURCE}, the same as the GH200's. NVLink 4, 900 GB/s, half of it each way, goes to "
        "others where the server has it: 4 in some, up to 256 in a DGX GH200. Servers of one have none, which is what stands "
        "here. Network cards are the server's.",
    ),
    "mi300x": Hardware(
        name="MI300X",
        device_memory_bytes=192 * GIB,
        device_memory_bytes_per_s=5.3e12,
        bf16_flop_per_s=1307.4e12,
        fp8_flop_per_s=2614.9e12,
        tf32_flop_per_s=653.7e12,
        link=Link(d2h_bytes_per_s=64e9, h2d_bytes_per_s=64e9, duplex_bytes_per_s=64e9),
        nvlink_bytes_per_s=448e9,
        nvlink_peer_bytes_per_s=64e9,
        nvlink_gpus=8,
        gpus_per_node=8,
        source="AMD Instinct MI300X Accelerator data sheet (2023): memory, rates without sparsity, PCIe Gen5 x16 128 GB/s, "
        "half of it each way. AMD Instinct MI300X Platform data sheet (2023): 8 of them, each with a link of Infinity Fabric "
        "to each of the 7 others, 128 GB/s, half of it each way; host memory and network cards are the server's.",
    ),
    "ascend-910b": Hardware(
        name="Ascend 910B",
        device_memory_bytes=64 * GIB,
        bf16_flop_per_s=280e12,
        gpus_per_node=8,
        source="No public data sheet of the processor. Gitee AI's page on its Ascend 910B clusters (read 2026): 64 GB, 8 a "
        "node, and 280 TFLOP/s in fp16, the same taken for bf16; other pages say 256 to 320. Bandwidth: pages "
        "differ from 0.4 to 1.2 TB/s, so none is given. Its link, too, has to be measured, and no page of the maker was found "
        "that names the rates of HCCS, between devices, or of its network cards.",
    ),
}
"""By the name that people type. Sparse rates are halved where the maker names only those."""


def _read_fields(cls: type[Hardware] | type[Link], document: Any, what: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ConfigError(f"{what} is {document!r}. Give an object with the fields of {cls.__name__}.")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in document:
        if key not in fields:
            nearest = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Give some of: {', '.join(fields)}."
            raise ConfigError(f"{what} has no field {key!r}. {hint}")
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if not has_default and document.get(name) is None:
            raise ConfigError(f"{what} lacks {name!r}. Add it.")
    return dict(document)


def _fill_from_base(document: Any, source: str) -> Any:
    """Return `document` with the fields of the device that its `base` names, where it has one."""
    if not isinstance(document, dict) or "base" not in document:
        return document
    name = document["base"]
    if not isinstance(name, str):
        raise ConfigError(f'base {name!r} is no text. Give a device of the table, as in "h100".')
    base = get_hardware(name)
    own = {key: value for key, value in document.items() if key != "base"}
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    if "device_memory_bytes_per_s" in own:
        fields["memory_efficiency"] = None  # it was measured of the other bandwidth
    if isinstance(own.get("link"), dict):
        # The rate of both ways at once is one of the link that was measured: with another rate it is another.
        own["link"] = {**dataclasses.asdict(base.link), "duplex_bytes_per_s": None, **own["link"]}
    return {**fields, "source": f"{base.source} {', '.join(own) or 'nothing'}: {source}.", **own}


def _strip(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
