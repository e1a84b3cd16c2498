"""Tests the hardware table, and hardware files of users."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from fgoffload import ConfigError
from fgoffload.planner.timing import hardware
from fgoffload.planner.timing.hardware import HARDWARE, Hardware, Link, check_for_times, find_hardware, get_hardware

SMALL = {"name": "small", "device_memory_bytes": 1, "gpus_per_node": 1, "source": "test"}
RATES = ("device_memory_bytes_per_s", "bf16_flop_per_s", "fp8_flop_per_s", "tf32_flop_per_s")


def read(**fields):
    return Hardware.from_json(json.dumps({**SMALL, **fields}), source="mine.json")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB300", "gb300"),
        ("H800", "h800"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA GH200 480GB", "gh200"),
    ],
)
def test_hardware_is_found_by_its_driver_name(name, key):
    assert get_hardware(name) is HARDWARE[key]


def test_a_hardware_file_overrides_fields_of_its_base_device():
    found = Hardware.from_json('{"base": "GH200 96GB", "nvlink_gpus": 4, "gpus_per_node": 4}', source="mine.json")
    table = get_hardware("gh200")
    assert found == dataclasses.replace(
        table, nvlink_gpus=4, gpus_per_node=4, source=f"{table.source} nvlink_gpus, gpus_per_node: mine.json."
    )
    # The measured memory efficiency applies only to the bandwidth in the table.
    assert Hardware.from_json('{"base": "h100", "name": "mine"}', source="mine.json").memory_efficiency == 0.92
    faster = Hardware.from_json('{"base": "h100", "device_memory_bytes_per_s": 4e12}', source="mine.json")
    assert faster.memory_efficiency is None
    with pytest.raises(
        ConfigError, match=r"memory_efficiency 1.2 must be above 0 and at most 1. Use a fraction, for example 0.8"
    ):
        Hardware.from_json('{"base": "h100", "memory_efficiency": 1.2}', source="mine.json")
    link = {"d2h_bytes_per_s": 20e9}
    changed = Hardware.from_json(json.dumps({"base": "h100", "link": link, "name": "mine"}), source="mine.json")
    assert (changed.link, changed.name) == (Link(d2h_bytes_per_s=20e9, h2d_bytes_per_s=52e9, is_measured=True), "mine")
    check_for_times(changed)
    assert changed.bf16_flop_per_s == get_hardware("h100").bf16_flop_per_s


def test_one_error_lists_all_missing_rates_with_an_example_file():
    with pytest.raises(ConfigError, match=r"has no device_memory_bytes_per_s, link.d2h_bytes_per_s, link.h2d_byte") as caught:
        check_for_times(get_hardware("ascend-910b"))
    (example,) = re.findall(r"for example (\{.*\}), or use --profile", str(caught.value))
    check_for_times(Hardware.from_json(example, source="the error"))
    for key in HARDWARE.keys() - {"ascend-910b"}:
        check_for_times(get_hardware(key))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device_memory_bytes": "80PB"}, r"device_memory_bytes '80PB' is not a size. .* for example 60GiB"),
        ({"bf16_flop": 1e12}, r"hardware has no field 'bf16_flop'. Did you mean 'bf16_flop_per_s'\?"),
        *(({name: -1}, rf"{name} -1 must be finite and above 0") for name in RATES),
    ],
)
def test_an_invalid_field_is_rejected_with_file_value_and_fix(fields, message):
    with pytest.raises(ConfigError, match=rf"^mine.json: {message}"):
        read(**fields)


def test_a_hardware_file_without_a_required_field_is_rejected(tmp_path):
    path = tmp_path / "lacking.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"hardware file .*lacking.json: hardware lacks 'name'. Add it"):
        Hardware.load(path)


def test_devices_without_an_entry_are_not_found():
    assert find_hardware("NVIDIA A100 80GB PCIe") is HARDWARE["a100-pcie"]
    assert [find_hardware(name) for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "CPU")] == [None] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"driver": "NVIDIA H200"}, "name or driver 'NVIDIA H200' is also a name of 'h200'. Use another name."),
        ({"gpus_per_node": None}, "hardware lacks 'gpus_per_node'. Add it."),
    ],
)
def test_errors_in_the_table_name_the_device(fields, message, monkeypatch):
    for names in ("HARDWARE", "_NAMES"):
        monkeypatch.setattr(hardware, names, dict(getattr(hardware, names)))
    with pytest.raises(ConfigError, match=f"^hardware.json, device 'mine': {message}$"):
        hardware._load_table(json.dumps({"mine": {**SMALL, **fields}}))


@pytest.mark.parametrize(("heading", "without"), [("Link to the host", {"ascend-910b"}), ("Links between ranks", set())])
def test_link_tables_of_the_hardware_page_list_each_device_once(heading, without):
    page = Path(__file__).parents[4] / "docs" / "reference" / "hardware.md"
    section = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    listed = [key for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for key in re.findall(r"`([^`]+)`", row)]
    assert sorted(listed) == sorted(HARDWARE.keys() - without), f"Update the table under '{heading}' in {page}."
