"""Tests that the page on tags lists every tag, recompute unit and held wait in the code."""

import re
from pathlib import Path
from unittest.mock import ANY

from fgoffload.integrations.megatron.host_waits.waits import HELD_WAITS
from fgoffload.tags import RECOMPUTE_UNITS, default_tags

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "tags.md"
TABLE = re.compile(r"^<!-- (\w+) -->\n(\|.*\n)(\|[-|]+\n)((?:\|.*\n)+)", re.MULTILINE)


def read_tables(text):
    """Return the rows of each table that a comment above it names, as lists of cells."""
    return {
        name: [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
        for name, _, _, rows in TABLE.findall(text)
    }


def test_the_tags_page_lists_exactly_the_recompute_units_in_the_code():
    units = []
    for unit in RECOMPUTE_UNITS:
        covers = " ".join(f"`{name}`" for name in unit.covers) or "-"
        module = f"`{unit.recompute_module}`" if unit.recompute_module else "-"
        units.append([f"`{unit.name}`", ANY, module, "everything else in the layer" if unit.name == "layer" else covers])
    assert read_tables(PAGE.read_text(encoding="utf-8"))["units"] == units


def test_the_tags_page_lists_a_site_for_each_tag_and_every_held_wait():
    tables = read_tables(PAGE.read_text(encoding="utf-8"))
    assert {row[0] for row in tables["sites"]} == {f"`{name}`" for name in default_tags().names}, f"Update the rows in {PAGE}."
    held = [row[0] for row in tables["waits"] if row[2] == "`hold`"]
    assert held == [f"`{wait.dispatcher}.{wait.method}`" for wait in HELD_WAITS]
