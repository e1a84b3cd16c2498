"""Parses sizes, and formats sizes and times.

G and GiB are 2**30 bytes, and GB is 10**9 bytes. K, M and T work the same way. We print sizes in GiB and rates in GB/s.
"""

import math
import re

from fgoffload.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

SIZE_UNITS = "SIZE: in KiB, MiB, GiB or TiB; G is GiB (2^30 bytes), GB is 10^9 bytes."
"""Explanation of sizes for the help messages of commands."""

_BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    **{unit: 1024**power for power, prefix in enumerate("KMGT", 1) for unit in (prefix, f"{prefix}IB")},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_bytes(text: str, *, name: str, needs_unit: bool = False) -> int:
    """Parse a size, such as `60GiB`, `18.9 G`, `64GB` or `1048576`. Sizes with a unit above B are rounded down to whole bytes.

    Args:
        text: Integer or decimal with an optional unit: B, KiB, K, KB, and the same for M, G and T, in upper or lower case.
        name: Flag or option as the user typed it.
        needs_unit: Whether to reject a number without a unit, except 0.

    Raises:
        ConfigError: `text` is not a size, is negative or too large, lacks a unit, or is not a whole number of bytes.
    """
    if text.strip().startswith("-") and _SIZE.fullmatch(text.strip()[1:]):
        raise ConfigError(f"{name} {text!r} is negative. Use a positive size, for example 512MiB.")
    match = _match_size(text)
    if match is None:
        raise ConfigError(f"{name} {text!r} is not a size. Use B, KiB, MiB, GiB, TiB or GB as the unit, for example 60GiB.")
    bytes_per_unit = _BYTES_PER_UNIT[match["unit"].upper()]
    size_bytes = float(match["number"]) * bytes_per_unit
    if math.isinf(size_bytes):
        raise ConfigError(f"{name} has {len(match['number'])} digits. Use a smaller size, for example 60GiB.")
    if needs_unit and not match["unit"] and size_bytes:
        raise ConfigError(f"{name} {text!r} has no unit. Add one of B, KiB, MiB, GiB or TiB, for example {match['number']}GiB.")
    # Most decimal fractions of a GiB are not whole bytes, and the last byte does not matter.
    if bytes_per_unit == 1 and not size_bytes.is_integer():
        raise ConfigError(f"{name} {text!r} is {size_bytes} bytes. Use a whole number of bytes.")
    return int(size_bytes)


def is_size(text: str) -> bool:
    """Return whether `text` is a number with a unit, such as `60GiB`."""
    match = _match_size(text)
    return match is not None and bool(match["unit"])


def _match_size(text: str) -> re.Match[str] | None:
    match = _SIZE.fullmatch(text)
    return match if match is not None and match["unit"].upper() in _BYTES_PER_UNIT else None


def check_bytes(size_bytes: object, *, name: str) -> int:
    """Check that `size_bytes`, the value of the option `name`, is an int, and return it. The value may be negative.

    Raises:
        ConfigError: `size_bytes` is not an int, for example a string such as `60GiB`, which only flags accept.
    """
    if isinstance(size_bytes, bool) or not isinstance(size_bytes, int):
        raise ConfigError(f"{name} {size_bytes!r} is not a whole number of bytes. Pass an int, for example 64 * fgoffload.MIB.")
    return size_bytes


def format_bytes(size_bytes: float) -> str:
    """Format a size in the largest binary unit that gives at least 1, such as `11.70 GiB` or `512 B`."""
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_ms(seconds: float) -> str:
    """Format seconds as milliseconds: `0.0205` becomes `20.5 ms`."""
    return f"{seconds * 1e3:.1f} ms"
