"""examples/benchmarks/copies_beside_host.py: the host's work beside copies, with the CPU in place of a GPU."""

import sys

import pytest
from support.scripts import load_script

from fgoffload.engine import CpuDevice
from fgoffload.units import MIB


@pytest.fixture
def script(monkeypatch):
    with load_script("copies_beside_host") as module:
        monkeypatch.setattr(module, "COPY_BYTES", MIB)
        yield module


def run(script, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["copies_beside_host.py", *words])
    return script.main()


def test_each_traffic_has_a_row_and_the_rates_of_its_directions(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "find_device", lambda kind: CpuDevice())
    assert run(script, monkeypatch, "--seconds", "0.001", "--repeats", "2") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("locking host memory: ")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert [(row[0], len(row[3].split())) for row in rows] == [
        ("nothing", 0),
        ("to the host", 1),
        ("to the device", 1),
        ("both ways", 2),
    ]
    assert all(float(row[1]) > 0 and float(row[2]) > 0 for row in rows)


def test_without_a_gpu_there_is_nothing_to_measure(script, monkeypatch, capsys):
    assert run(script, monkeypatch) == 2
    assert "none is here" in capsys.readouterr().err
