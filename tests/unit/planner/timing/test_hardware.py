"""The hardware table, and hardware that users bring in a file."""

import dataclasses
import doctest
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgoffload import ConfigError
from fgoffload.planner.timing import hardware
from fgoffload.planner.timing.hardware import HARDWARE, Hardware, Link, check_for_times, get_hardware
from fgoffload.units import GIB, TIB

PAGE = Path(__file__).parents[4] / "docs" / "planner" / "hardware.md"
BETWEEN = ("nvlink_bytes_per_s", "nvlink_peer_bytes_per_s", "network_bytes_per_s")
SMALL = {"name": "small", "device_memory_bytes": 1, "gpus_per_node": 1, "source": "test"}
RATES = ("device_memory_bytes_per_s", "bf16_flop_per_s", "fp8_flop_per_s", "tf32_flop_per_s")
LINK_RATES = ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s")


def read(**fields):
    return Hardware.from_json(json.dumps({**SMALL, **fields}), source="mine.json")


@pytest.mark.parametrize("key", HARDWARE)
def test_hardware_is_found_by_key_and_by_name_however_they_are_written(key):
    found = HARDWARE[key]
    for name in (
        key,
        key.upper(),
        f" {key} ",
        key.replace("-", "_"),
        found.name,
        found.name.lower(),
        found.name.replace(" ", "-"),
    ):
        assert get_hardware(name) is found


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("h10", "h100"),
        ("H 1000", "h100"),
        ("mi300", "mi300x"),
        ("ascend 910", "ascend-910b"),
        ("a100 40gb sxm", "a100"),
        ("gb300", "gb200"),
    ],
)
def test_a_near_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(
        ConfigError, match=rf"hardware '{name}' is not known. Did you mean '{nearest}'\? Give one of: a100, h100, "
    ):
        get_hardware(name)


@pytest.mark.parametrize("name", ["", "tpu v5p", "-"])
def test_a_far_name_is_answered_with_all_names_and_no_guess(name):
    with pytest.raises(
        ConfigError, match=rf"hardware '{name}' is not known. Give one of: a100, .*ascend-910b; or a file of your own"
    ):
        get_hardware(name)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_hardware_is_found_by_what_its_driver_calls_it(name, key):
    assert get_hardware(name) is HARDWARE[key]


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-PCIE-40GB", "CPU"])
def test_a_driver_names_no_other_card_of_the_same_chip(name):
    with pytest.raises(ConfigError, match="is not known"):
        get_hardware(name)


@pytest.mark.parametrize("name", [None, 100])
def test_what_is_no_name_is_answered_with_how_to_give_one(name):
    with pytest.raises(ConfigError, match=rf'hardware {name} is no text\. .*, as in get_hardware\("h100"\)\.'):
        get_hardware(name)


@pytest.mark.parametrize("found", HARDWARE.values(), ids=HARDWARE)
def test_the_figures_of_the_table_agree_with_each_other(found):
    assert re.search(r"\(.*20\d\d\)", found.source), "a source has its year"
    assert found.device_memory_bytes % GIB == 0
    assert found.bf16_flop_per_s > 1e14
    if found.fp8_flop_per_s is not None:
        assert found.fp8_flop_per_s == pytest.approx(2 * found.bf16_flop_per_s, rel=1e-3)
    if found.tf32_flop_per_s is not None:
        assert found.tf32_flop_per_s == pytest.approx(found.bf16_flop_per_s / 2, rel=0.03)
    if found.link.duplex_bytes_per_s is not None:
        assert found.link.duplex_bytes_per_s <= min(found.link.d2h_bytes_per_s, found.link.h2d_bytes_per_s)
        assert found.link.h2d_bytes_per_s < found.device_memory_bytes_per_s
    if found.nvlink_bytes_per_s is not None:
        assert found.nvlink_bytes_per_s < found.device_memory_bytes_per_s
        assert found.nvlink_gpus % found.gpus_per_node == 0
    if found.nvlink_peer_bytes_per_s is not None:
        assert found.nvlink_peer_bytes_per_s * (found.nvlink_gpus - 1) == found.nvlink_bytes_per_s


def test_what_was_measured_and_what_is_not_public_is_said():
    assert [key for key, found in HARDWARE.items() if found.link.is_measured] == ["h100", "h200"]
    assert get_hardware("h100").link == Link(
        d2h_bytes_per_s=54e9, h2d_bytes_per_s=52e9, duplex_bytes_per_s=42e9, is_measured=True
    )
    assert [key for key, found in HARDWARE.items() if found.memory_efficiency is not None] == ["h100"]
    assert get_hardware("h200").link == Link(
        d2h_bytes_per_s=55.1e9, h2d_bytes_per_s=54.5e9, duplex_bytes_per_s=50.5e9, is_measured=True
    )
    assert get_hardware("a100").fp8_flop_per_s is None
    assert get_hardware("mi300x").host_memory_bytes_per_node is None
    unknown = get_hardware("ascend-910b")
    assert (unknown.link, unknown.device_memory_bytes_per_s, unknown.host_memory_bytes_per_node) == (Link(), None, None)


@pytest.mark.parametrize("key", HARDWARE)
def test_hardware_written_as_json_is_read_back_the_same(key, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dataclasses.asdict(HARDWARE[key])), encoding="utf-8")
    assert Hardware.load(path) == HARDWARE[key]


def test_the_example_of_the_page_is_read(tmp_path):
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = Hardware.from_json(text, source="docs/planner/hardware.md")
    assert (found.device_memory_bytes, found.host_memory_bytes_per_node, found.fp8_flop_per_s) == (48 * GIB, 512 * GIB, None)
    assert found.link.is_measured


def test_the_page_names_all_hardware_of_the_table():
    text = PAGE.read_text(encoding="utf-8")
    assert [key for key in HARDWARE if f"`{key}`" not in text] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16_flop_per_s": 10**400}, r"bf16_flop_per_s 10{19} is not from 1e\+06 to 1e\+21 a second, .* Give it as in 50e9"),
        ({"device_memory_bytes_per_s": 1e-300}, "device_memory_bytes_per_s 1e-300 is not from"),
        ({"link": {"d2h_bytes_per_s": 1e300}}, r"d2h_bytes_per_s 1e\+300 is not from"),
        (
            {"link": {"d2h_bytes_per_s": 20e9, "h2d_bytes_per_s": 10e9, "duplex_bytes_per_s": 11e9}},
            r"duplex_bytes_per_s 1.1e\+10 is above 1e\+10, the slower way alone. .* give as much or less",
        ),
    ],
)
def test_a_rate_that_no_device_has_is_refused_in_a_file(changes, message):
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_what_may_be_unknown_can_be_left_out_or_null():
    assert read() == Hardware(**SMALL)
    unknown = (*RATES, *BETWEEN, "nvlink_gpus", "host_memory_bytes_per_node", "link")
    assert read(**dict.fromkeys(unknown)) == Hardware(**SMALL)


def test_a_file_begins_with_a_device_of_the_table_and_changes_what_it_says():
    found = Hardware.from_json('{"base": "GH200 96GB", "nvlink_gpus": 4, "gpus_per_node": 4}', source="mine.json")
    table = get_hardware("gh200")
    assert found == dataclasses.replace(
        table, nvlink_gpus=4, gpus_per_node=4, source=f"{table.source} nvlink_gpus, gpus_per_node: mine.json."
    )
    # What kernels reach was measured of the bandwidth that the table has, and of no other.
    assert Hardware.from_json('{"base": "h100", "name": "mine"}', source="mine.json").memory_efficiency == 0.92
    faster = Hardware.from_json('{"base": "h100", "device_memory_bytes_per_s": 4e12}', source="mine.json")
    assert faster.memory_efficiency is None
    with pytest.raises(ConfigError, match=r"memory_efficiency 1.2 is not above 0 and at most 1. Give a part like 0.8"):
        Hardware.from_json('{"base": "h100", "memory_efficiency": 1.2}', source="mine.json")
    link = {"d2h_bytes_per_s": 20e9}
    changed = Hardware.from_json(json.dumps({"base": "h100", "link": link, "name": "mine"}), source="mine.json")
    assert (changed.link, changed.name) == (Link(d2h_bytes_per_s=20e9, h2d_bytes_per_s=52e9, is_measured=True), "mine")
    check_for_times(changed)
    assert changed.bf16_flop_per_s == get_hardware("h100").bf16_flop_per_s


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("h1000", r"hardware 'h1000' is not known. Did you mean 'h100'\?"),
        ("910b", r"hardware '910b' is not known. Did you mean 'ascend-910b'\?"),
        ("nvidia h100 pcie", r"hardware 'nvidia h100 pcie' is not known. Did you mean 'h100'\?"),
        ("b", r"hardware 'b' is not known. Give one of: "),
        (100, "base 100 is no text. Give a device of the table"),
    ],
)
def test_a_file_that_begins_with_no_device_of_the_table_is_refused(base, message):
    with pytest.raises(ConfigError, match=f"^mine.json: {message}"):
        Hardware.from_json(json.dumps({"base": base}), source="mine.json")


def test_what_is_missing_for_times_is_named_at_once_with_a_file_that_has_it():
    with pytest.raises(ConfigError, match=r"has no device_memory_bytes_per_s, link.d2h_bytes_per_s, link.h2d_byte") as caught:
        check_for_times(get_hardware("ascend-910b"))
    (example,) = re.findall(r"as in (\{.*\}), or --profile", str(caught.value))
    check_for_times(Hardware.from_json(example, source="the error"))
    for key in HARDWARE.keys() - {"ascend-910b"}:
        check_for_times(get_hardware(key))


@given(st.integers(1, 4096), st.sampled_from(["GiB", " TiB"]))
def test_memory_is_read_with_its_unit_or_in_bytes(number, unit):
    size_bytes = number * (GIB if unit == "GiB" else TIB)
    for size in (f"{number}{unit}", size_bytes):
        found = read(device_memory_bytes=size, host_memory_bytes_per_node=size)
        assert (found.device_memory_bytes, found.host_memory_bytes_per_node) == (size_bytes, size_bytes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, r"name '' is no text"),
        ({"name": 3}, r"name 3 is no text"),
        ({"source": None}, r"hardware lacks 'source'. Add it"),
        ({"gpus_per_node": 0}, r"gpus_per_node 0 is below 1. Give 1 or more"),
        ({"gpus_per_node": 8.0}, r"gpus_per_node 8.0 is no whole number"),
        ({"device_memory_bytes": 80e9}, r"device_memory_bytes 80000000000.0 is no whole number"),
        ({"device_memory_bytes": "80PB"}, r"device_memory_bytes '80PB' is not a size. .* as in 60GiB"),
        ({"device_memory_bytes": "-1GiB"}, r"device_memory_bytes '-1GiB' is below 0"),
        ({"host_memory_bytes_per_node": -5}, r"host_memory_bytes_per_node -5 is below 1"),
        ({"bf16_flop": 1e12}, r"hardware has no field 'bf16_flop'. Did you mean 'bf16_flop_per_s'\?"),
        ({"zzz": 1}, r"hardware has no field 'zzz'. Give some of: name, device_memory_bytes"),
        ({"link": {"d2h": 1e9}}, r"link has no field 'd2h'"),
        ({"link": 50e9}, r"link is 50000000000.0. Give an object with the fields of Link"),
        ({"link": {"is_measured": "yes"}}, r"is_measured 'yes' is neither true nor false"),
        *(({name: -1}, rf"{name} -1 is not above 0 and finite") for name in RATES),
        *(({name: 0}, rf"{name} 0 is not above 0 and finite") for name in BETWEEN),
        ({"nvlink_gpus": 0}, r"nvlink_gpus 0 is below 1"),
        *(({"link": {name: 0}}, rf"{name} 0 is not above 0 and finite") for name in LINK_RATES),
        ({"bf16_flop_per_s": "fast"}, r"bf16_flop_per_s 'fast' is no number. Give one like 50e9"),
        ({"device_memory_bytes": "48"}, r"device_memory_bytes '48' has no unit"),
        ({"bf16_flop_per_s": True}, r"bf16_flop_per_s True is no number"),
        ({"bf16_flop_per_s": float("nan")}, r"bf16_flop_per_s nan is not above 0 and finite"),
        ({"bf16_flop_per_s": float("inf")}, r"bf16_flop_per_s inf is not above 0 and finite"),
    ],
)
def test_a_field_that_cannot_be_is_refused_with_the_file_the_value_and_the_fix(fields, message):
    with pytest.raises(ConfigError, match=rf"^mine.json: {message}"):
        read(**fields)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", '"h100"', "[" * 100_000, "1" * 5000], ids=lambda text: text[:6])
def test_text_that_is_no_object_is_refused(text):
    with pytest.raises(
        ConfigError, match=r"^mine.json(: hardware is .*| is not JSON: .*)Give an object with the fields of Hardware"
    ):
        Hardware.from_json(text, source="mine.json")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"hardware file .*none.json: No such file or directory. Give the path of a JSON file"
    ):
        Hardware.load(tmp_path / "none.json")
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"hardware file .*binary.json: not UTF-8 text"):
        Hardware.load(path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"hardware file .*binary.json: hardware lacks 'name'. Add it"):
        Hardware.load(path)


def test_the_example_of_the_module_runs():
    results = doctest.testmod(hardware)
    assert (results.failed, results.attempted) == (0, 1)
