"""The page on Megatron-Core shows the tables of the code, row by row, and a plan that can be read."""

import re
from pathlib import Path

import pytest

from fgoffload.integrations.megatron.site_table import SITES, WAITS
from fgoffload.integrations.megatron.waits import Remedy
from fgoffload.plan import Action, OffloadPlan
from fgoffload.tags import RECOMPUTE_UNITS, default_tags

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks" / "megatron.md"
TABLE = re.compile(r"^<!-- (\w+) -->\n(\|.*\n)(\|[-|]+\n)((?:\|.*\n)+)", re.MULTILINE)


def read_tables(text):
    """Return the rows of each table that has a name in a comment above it, as lists of cells."""
    return {
        name: [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
        for name, _, _, rows in TABLE.findall(text)
    }


def name_method(row):
    module, _, owner = row.owner.partition(":")
    return f"`{owner or module.rpartition('.')[2]}.{row.method}`"


def list_expected():
    """Return by table the rows that the code has."""
    units = []
    for unit in RECOMPUTE_UNITS:
        covers = " ".join(f"`{name}`" for name in unit.covers) or "-"
        module = f"`{unit.recompute_module}`" if unit.recompute_module else "-"
        units.append([f"`{unit.name}`", unit.runs, module, "everything else in the layer" if unit.name == "layer" else covers])
    return {
        "sites": [[f"`{row.tag}`", name_method(row), row.saves, row.call_site.value, row.since] for row in SITES],
        "units": units,
        "waits": [[name_method(row), row.what, f"`{row.remedy.name.lower()}`", row.since] for row in WAITS],
    }


@pytest.mark.parametrize("name", ["sites", "units", "waits"])
def test_a_table_of_the_page_has_exactly_the_rows_of_the_code(name):
    assert read_tables(PAGE.read_text(encoding="utf-8"))[name] == list_expected()[name]


def test_every_remedy_is_explained():
    text = PAGE.read_text(encoding="utf-8")
    assert [remedy for remedy in Remedy if f"\n- `{remedy.name.lower()}`: " not in text] == []


def test_the_plan_of_the_page_is_one_and_has_every_action():
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    plan = OffloadPlan.from_json(block, source="the page")
    names = {*default_tags().names, *(unit.name for unit in RECOMPUTE_UNITS)}
    assert {site.tag for site in plan.actions} <= names
    assert set(plan.actions.values()) == set(Action)


MATRIX_TESTS = ROOT / "tests" / "unit" / "megatron" / "test_matrix.py"


def test_every_row_of_the_cpu_matrix_that_the_page_names_exists():
    named = set(re.findall(r"`matrix\[(\w+)\]`", PAGE.read_text(encoding="utf-8")))
    rows = set(re.findall(r'^    "(\w+)": Row\(', MATRIX_TESTS.read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert sorted(named - rows) == []


def test_every_test_file_that_the_page_names_exists():
    folder = MATRIX_TESTS.parent
    named = set(re.findall(r"`((?:\.\./)?(?:\w+/)?test_\w+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert named
    assert [name for name in sorted(named) if not (folder / name).is_file()] == []


def test_a_row_that_is_missing_from_a_page_is_found():
    text = PAGE.read_text(encoding="utf-8")
    first = next(line for line in text.splitlines() if line.startswith("| `layer_input` |"))
    assert read_tables(text.replace(first + "\n", ""))["sites"] != list_expected()["sites"]
