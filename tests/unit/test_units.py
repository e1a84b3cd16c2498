"""Tests parsing and formatting of sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgoffload.errors import ConfigError
from fgoffload.units import GIB, KIB, MIB, TIB, format_bytes, format_ms, parse_bytes

UNITS = {
    **{"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB},
    **{"K": KIB, "M": MIB, "G": GIB, "T": TIB},
    **{"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
}


def test_binary_units_are_powers_of_1024():
    assert (KIB, MIB, GIB, TIB) == (2**10, 2**20, 2**30, 2**40)


@given(number=st.integers(0, 4096), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " "]))
def test_parse_bytes_accepts_all_units(number, unit, space):
    assert parse_bytes(f"{number}{space}{unit}", name="--size") == number * UNITS[unit]


@pytest.mark.parametrize("text", ["60Gb/s", "60P", "1e9", "--1GiB", "GiB", "", "60 Gi B", "1,5GiB", "nan", "inf"])
def test_an_invalid_size_text_is_rejected_with_flag_value_and_units(text):
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, name="--offload-window")
    assert str(caught.value) == (
        f"--offload-window {text!r} is not a size. Use B, KiB, MiB, GiB, TiB or GB as the unit, for example 60GiB."
    )


@pytest.mark.parametrize("text", ["-1MiB", "-1", " -0.5 GiB"])
def test_a_negative_size_is_rejected(text):
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, name="--offload-window")
    assert str(caught.value) == (f"--offload-window {text!r} is negative. Use a positive size, for example 512MiB.")


def test_a_fractional_byte_is_rejected():
    with pytest.raises(ConfigError) as caught:
        parse_bytes("307.2 B", name="--offload-window")
    assert str(caught.value) == "--offload-window '307.2 B' is 307.2 bytes. Use a whole number of bytes."


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * KIB, "1.50 MiB"),
        (12 * GIB, "12.00 GiB"),
        (2 * TIB, "2.00 TiB"),
        (-3 * MIB, "-3.00 MiB"),
    ],
)
def test_bytes_are_formatted_in_the_largest_unit_below_them(size_bytes, text):
    assert format_bytes(size_bytes) == text


def test_seconds_are_formatted_as_milliseconds():
    assert format_ms(0.0205) == "20.5 ms"


@pytest.mark.parametrize("text", ["1", "76", "4294967296", " 1.0 "])
def test_a_size_without_a_unit_is_rejected(text):
    with pytest.raises(
        ConfigError, match=rf"--reserve {text!r} has no unit\. Add one of B, KiB, .* for example {text.strip()}GiB"
    ):
        parse_bytes(text, name="--reserve", needs_unit=True)
