"""The page on Megatron-Core shows the tables of the code, row by row, and a plan that can be read."""

import re
from pathlib import Path
from unittest.mock import ANY

import pytest

from fgoffload.integrations.megatron.adapter.site_table import SITES, WAITS
from fgoffload.tags import RECOMPUTE_UNITS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "tags.md"
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
        units.append([f"`{unit.name}`", ANY, module, "everything else in the layer" if unit.name == "layer" else covers])
    return {
        "sites": [[f"`{row.tag}`", name_method(row), row.saves, row.call_site.value, row.since] for row in SITES],
        "units": units,
        "waits": [[name_method(row), row.what, f"`{row.remedy.name.lower()}`", row.since] for row in WAITS],
    }


@pytest.mark.parametrize("name", ["sites", "units", "waits"])
def test_a_table_of_the_page_has_exactly_the_rows_of_the_code(name):
    assert read_tables(PAGE.read_text(encoding="utf-8"))[name] == list_expected()[name]
