import json

import pytest
from support.machines import Answers, make_machine

from fgoffload.cli import main
from fgoffload.doctor import CommandResult, Machine


@pytest.fixture
def use(monkeypatch, tmp_path):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)

    def use(**changes):
        monkeypatch.setattr(Machine, "here", staticmethod(lambda: make_machine(tmp_path, **changes)))

    return use


def test_a_table_has_a_row_for_each_check_and_what_to_do(use, capsys, monkeypatch):
    use(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0  # a warning is no error
    shown = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3" in shown
    assert "warning" in shown
    assert "to do: unset CUDA_DEVICE_MAX_CONNECTIONS" in shown


def test_an_error_ends_with_code_1(use, capsys):
    use(run=Answers(probe=CommandResult(1, "ImportError: none")).run)
    assert main(["doctor"]) == 1
    assert "error" in capsys.readouterr().out


def test_json_has_the_same_rows_and_codes(use, capsys):
    use(python_version="3.9.0")
    assert main(["doctor", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["checks"]
    assert rows[0] == {"name": "Python", "status": "error", "found": "3.9.0", "fix": "use Python 3.10 to 3.13"}
    assert {row["status"] for row in rows[1:]} == {"ok"}


def test_this_machine_without_a_gpu_can_be_checked(capsys):
    assert main(["doctor", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert rows["GPUs"] == {"name": "GPUs", "status": "skipped", "found": "no GPU that torch can use", "fix": ""}
    assert rows["host memory"]["status"] in ("ok", "warning")
