"""The page on Megatron-Core shows the tables of the code, row by row, and a plan that can be read."""

import re
from collections import Counter
from pathlib import Path

import pytest
from gpu.megatron_rows import ROWS

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


RESULTS = ROOT / "docs" / "results" / "megatron_h200_202611.md"
NUMBERS = {"one": 1, "two": 2, "four": 4, "six": 6}


def list_ran():
    """Return the rows that the page of results says have run: name, GPUs, and how many tags were selected."""
    ran, text = [], RESULTS.read_text("utf-8")
    for gpus, table in re.findall(r"^\| (\w+) H200 \| tags that moved \|\n\|[-|]+\n((?:\|.*\n)+)", text, re.M):
        for line in table.splitlines():
            name, moved = (cell.strip() for cell in line.strip("|").split("|"))
            name = name.partition(" (`--")[0]  # behind it are flags of ours
            # "tag `mlp_fc1`, `mlp_act`: two rows" are as many.
            tags = re.match(r"tag ((?:(?:, )?`\w+`)+)", name)
            names = [f"tag {tag}" for tag in re.findall(r"`(\w+)`", tags[1])] if tags else [name]
            ran += [(name, NUMBERS[gpus], int(re.search(r"of (\d+)", moved)[1])) for name in names]
    return ran


def count_tags(row):
    return len(row.tags.split() or {tag for _, tag, action in row.plan if action.endswith("offload")})


def test_rows_on_gpus_have_run_and_are_among_the_results_or_the_page_says_that_they_have_not():
    named = re.findall(r"row `([^`]+)`, not run yet", PAGE.read_text("utf-8"))
    ran = list_ran()
    assert [name for name, _, _ in ran if name in named] == []
    assert sorted(ran) == sorted((row.name, row.gpus, count_tags(row)) for row in ROWS if row.name not in named)


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("README.md", r"\[(\d+) rows\]"),
        ("docs/frameworks/moving_from_megatron.md", r"(\d+) trainings on H200 and H100 are \[equal to the bit\]"),
    ],
)
def test_a_page_says_how_many_rows_have_run_on_gpus(page, pattern):
    assert re.findall(pattern, (ROOT / page).read_text("utf-8")) == [str(len(list_ran()))]


def test_pages_say_how_many_rows_have_run_on_so_many_gpus():
    by_gpus = Counter(gpus for _, gpus, _ in list_ran())
    page, results = PAGE.read_text("utf-8"), RESULTS.read_text("utf-8")
    (two, four) = re.search(r"All (\d+) rows for one GPU and for two .*?\bso did the (\w+) for four GPUs", page, re.S).groups()
    assert (int(two), NUMBERS[four]) == (by_gpus[1] + by_gpus[2], by_gpus[4])
    assert re.findall(r"\*\*All (\d+) reproduce themselves", results) == [two]
    assert f"on four H200 of one host, {by_gpus[4]} of {by_gpus[4]}," in results


def test_pages_say_alike_how_many_rows_have_run_with_the_development_branch():
    (ran,) = re.findall(r"\b(\d+) rows ran with Megatron-LM's development branch", RESULTS.read_text("utf-8"))
    assert f"runs the GPU rows with the branch: {ran} of them have run" in PAGE.read_text("utf-8")
    assert f"| {ran} of these rows, " in (ROOT / "README.md").read_text("utf-8")
