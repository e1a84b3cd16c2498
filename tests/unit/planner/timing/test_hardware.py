"""The hardware table, and hardware that users bring in a file."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from fgoffload import ConfigError
from fgoffload.planner.timing.hardware import HARDWARE, Hardware, Link, check_for_times, get_hardware
from fgoffload.units import GIB

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "hardware.md"
SMALL = {"name": "small", "device_memory_bytes": 1, "gpus_per_node": 1, "source": "test"}
RATES = ("device_memory_bytes_per_s", "bf16_flop_per_s", "fp8_flop_per_s", "tf32_flop_per_s")


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


@pytest.mark.parametrize("key", HARDWARE)
def test_hardware_written_as_json_is_read_back_the_same(key, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dataclasses.asdict(HARDWARE[key])), encoding="utf-8")
    assert Hardware.load(path) == HARDWARE[key]


def test_the_example_of_the_page_is_read(tmp_path):
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = Hardware.from_json(text, source="docs/reference/hardware.md")
    assert (found.device_memory_bytes, found.host_memory_bytes_per_node, found.fp8_flop_per_s) == (48 * GIB, 512 * GIB, None)
    assert found.link.is_measured


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


def test_what_is_missing_for_times_is_named_at_once_with_a_file_that_has_it():
    with pytest.raises(ConfigError, match=r"has no device_memory_bytes_per_s, link.d2h_bytes_per_s, link.h2d_byte") as caught:
        check_for_times(get_hardware("ascend-910b"))
    (example,) = re.findall(r"as in (\{.*\}), or --profile", str(caught.value))
    check_for_times(Hardware.from_json(example, source="the error"))
    for key in HARDWARE.keys() - {"ascend-910b"}:
        check_for_times(get_hardware(key))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, r"name '' is no text"),
        ({"source": None}, r"hardware lacks 'source'. Add it"),
        ({"gpus_per_node": 8.0}, r"gpus_per_node 8.0 is no whole number"),
        ({"device_memory_bytes": "80PB"}, r"device_memory_bytes '80PB' is not a size. .* as in 60GiB"),
        ({"bf16_flop": 1e12}, r"hardware has no field 'bf16_flop'. Did you mean 'bf16_flop_per_s'\?"),
        *(({name: -1}, rf"{name} -1 is not above 0 and finite") for name in RATES),
        ({"bf16_flop_per_s": "fast"}, r"bf16_flop_per_s 'fast' is no number. Give one like 50e9"),
        ({"bf16_flop_per_s": float("nan")}, r"bf16_flop_per_s nan is not above 0 and finite"),
    ],
)
def test_a_field_that_cannot_be_is_refused_with_the_file_the_value_and_the_fix(fields, message):
    with pytest.raises(ConfigError, match=rf"^mine.json: {message}"):
        read(**fields)


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
