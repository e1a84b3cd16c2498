"""Tests the exit code and the JSON of `fgoffload doctor`."""

import json

import pytest
from support.machines import CommandOutputs, make_machine

from fgoffload import doctor
from fgoffload.cli import main
from fgoffload.doctor import CommandResult


@pytest.fixture
def replace_machine(monkeypatch, tmp_path):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)

    def replace_machine(**changes):
        monkeypatch.setattr(doctor, "Machine", lambda: make_machine(tmp_path, **changes))

    return replace_machine


def test_an_error_exits_with_code_1(replace_machine, capsys):
    replace_machine(run=CommandOutputs(probe=CommandResult(1, "ImportError: none")).run)
    assert main(["doctor"]) == 1
    assert "error" in capsys.readouterr().out


def test_doctor_checks_this_machine_without_a_gpu(capsys):
    assert main(["doctor", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert rows["GPUs"] == {"name": "GPUs", "status": "skipped", "found": "torch finds no usable GPU", "fix": ""}
    assert rows["host memory"]["status"] in ("ok", "warning")
