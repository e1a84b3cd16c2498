import subprocess
import sys

import pytest

import fgoffload

pytestmark = pytest.mark.quick

PUBLIC = (
    *("Action", "BudgetError", "ConfigError", "HostMemory", "IntegrationError", "InternalError", "ModelOffload"),
    *("OffloadConfig", "OffloadError", "OffloadPlan", "OffloadedTensor", "PlacedRegion", "PlanError", "SavedTensors"),
    *("SavingsEstimate", "Site", "StateError", "Tag", "TagRegistry", "TransferConfig", "TransferPolicy", "default_tags"),
    *("estimate_savings", "offload", "offload_tensor", "region", "saved_tensors"),
)
HEAVY = ("torch", "megatron", "transformer_engine", "rich", "matplotlib", "numpy")
MOST_IMPORT_SECONDS = 0.5


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_public_names_are_these_and_no_others():
    assert tuple(fgoffload.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported_and_is_documented(name):
    assert getattr(fgoffload, name).__doc__


@pytest.mark.parametrize("module", ["fgoffload", "fgoffload.cli"])
def test_importing_loads_nothing_heavy(module):
    code = f"import sys, {module}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    assert run_python(code) == ""


def test_importing_takes_less_than_half_a_second():
    code = "import time; start = time.process_time(); import fgoffload.cli; print(time.process_time() - start)"
    # Seconds of this process, the least of three.
    assert min(float(run_python(code)) for _ in range(3)) < MOST_IMPORT_SECONDS
