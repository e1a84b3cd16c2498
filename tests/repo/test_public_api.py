"""Tests the public names, their documentation, and light imports."""

import dataclasses
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import run_commands

import fgoffload

pytestmark = pytest.mark.quick

PUBLIC = (
    *("Action", "BudgetError", "ConfigError", "GIB", "HostMemory", "IntegrationError", "InternalError", "MIB", "ModelOffload"),
    *("OffloadConfig", "OffloadError", "OffloadPlan", "OffloadedTensor", "PlacedRegion", "PlanError", "SavedTensors"),
    *("SavingsEstimate", "Site", "StateError", "Tag", "TagRegistry", "TransferConfig", "TransferPolicy", "default_tags"),
    *("estimate_savings", "explain", "offload", "offload_tensor", "region", "saved_tensors"),
)
API_PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
HEAVY = ("torch", "megatron", "transformer_engine", "rich", "matplotlib", "numpy")


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_public_names():
    assert tuple(fgoffload.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_and_dataclass_field_is_documented(name):
    public = getattr(fgoffload, name)
    assert public.__doc__
    assert f".{name}\n" in API_PAGE or name in ("GIB", "MIB") or name.endswith("Error")
    for field in dataclasses.fields(public) if dataclasses.is_dataclass(public) else ():
        assert f"\n        {field.name}: " in public.__doc__, field.name


@pytest.mark.parametrize("module", ["fgoffload", "fgoffload.cli"])
def test_import_loads_no_heavy_packages(module):
    code = f"import sys, {module}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    assert run_python(code) == ""


def test_plan_and_doctor_work_without_torch():
    plan = ("fgoffload", "plan", "llama3_8b", "--gpu", "h100", "--offload-memory-budget", "75GiB")
    planned, checked = run_commands(plan, ("fgoffload", "doctor", "--json"), without=("torch", "megatron", "transformers"))
    assert planned.returncode == 0, planned.stderr
    assert "this plan" in planned.stdout
    rows = {row["name"]: row for row in json.loads(checked.stdout)["checks"]}
    assert (checked.returncode, rows["torch"]["status"], rows["Python"]["status"]) == (1, "error", "ok")


def test_generated_reference_tables_are_up_to_date():
    pages = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "pages.py"))
    assert pages["find_stale"]() == {}, "run: make pages"
