"""Parses and formats bytes and seconds.

G and GiB are 2**30 bytes, GB is 10**9, and likewise for K, M and T. Sizes are shown in GiB, link rates in GB/s, as vendors do.
"""

import math
import re

from fgoffload.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

SIZE_UNITS = "SIZE: in KiB, MiB, GiB or TiB; G is GiB (2^30 bytes), GB is 10^9 bytes."
"""Sentence on sizes for the help texts of commands."""

_BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    **{unit: 1024**power for power, prefix in enumerate("KMGT", 1) for unit in (prefix, f"{prefix}IB")},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_bytes(text: str, *, name: str, needs_unit: bool = False) -> int:
    """Parse a size: `60GiB`, `18.9 G`, `64GB`, `1048576`. Fractions of a byte are dropped.

    Args:
        text: Number, whole or with a decimal point, and B, KiB, K or KB, or the same for M, G, T (any case; none means bytes).
        name: Flag or option of the size, as the user typed it.
        needs_unit: Whether to reject a number without a unit, except 0.

    Raises:
        ConfigError: `text` is not a size, its unit is unknown or missing, or it is a fraction of a byte.
    """
    if text.strip().startswith("-") and _SIZE.fullmatch(text.strip()[1:]):
        raise ConfigError(f"{name} {text!r} is negative. Give 0 or a size like 512MiB.")
    match = _match_size(text)
    if match is None:
        raise ConfigError(f"{name} {text!r} is not a size. Write a number and one of B, KiB, MiB, GiB, TiB, GB, as in 60GiB.")
    bytes_per_unit = _BYTES_PER_UNIT[match["unit"].upper()]
    size_bytes = float(match["number"]) * bytes_per_unit
    if math.isinf(size_bytes):
        raise ConfigError(f"{name} has {len(match['number'])} digits. Give a size that memory can have, as in 60GiB.")
    if needs_unit and not match["unit"] and size_bytes:
        raise ConfigError(f"{name} {text!r} has no unit. Add one of B, KiB, MiB, GiB, TiB, as in {match['number']}GiB.")
    # Most decimal fractions of a GiB are not whole bytes, and the last byte does not matter.
    if bytes_per_unit == 1 and not size_bytes.is_integer():
        raise ConfigError(f"{name} {text!r} is {size_bytes} bytes. Give a whole number of bytes.")
    return int(size_bytes)


def _match_size(text: str) -> re.Match[str] | None:
    """Match a number with a known unit or none."""
    match = _SIZE.fullmatch(text)
    return match if match is not None and match["unit"].upper() in _BYTES_PER_UNIT else None


def check_bytes(size_bytes: object, *, name: str) -> int:
    """Return `size_bytes`, which was given in code for `name` and may be negative.

    Raises:
        ConfigError: The size is not a whole number. Text is rejected, since only flags are text.
    """
    if isinstance(size_bytes, str):
        raise ConfigError(
            f"{name} {size_bytes!r} is text, not a number of bytes. Give an int, as `fgoffload.units.parse_bytes` returns it "
            "for text like '1MiB'."
        )
    if isinstance(size_bytes, bool) or not isinstance(size_bytes, int):
        raise ConfigError(f"{name} {size_bytes!r} is not a whole number of bytes. Give an int, as in 64 * fgoffload.units.MIB.")
    return size_bytes


def format_bytes(size_bytes: float) -> str:
    """Return `size_bytes` with the largest binary unit that keeps it at 1 or more: `11.7 GiB`, `512 B`."""
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_ms(seconds: float) -> str:
    """Return `seconds` as milliseconds: `0.0205` becomes `20.5 ms`."""
    return f"{seconds * 1e3:.1f} ms"
