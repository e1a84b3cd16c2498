"""docs/planner.md is short, and what it shows is what the code, the formulas and the results say."""

import re
from pathlib import Path

import pytest

from fgoffload.planner.memory.static_memory import DEFAULT_RESERVE_BYTES
from fgoffload.planner.ranks.schedule import Pipeline, count_warmup_passes
from fgoffload.planner.timing.efficiency import ASSUMED_MEMORY, Efficiency
from fgoffload.planner.timing.hardware import HARDWARE
from fgoffload.planner.timing.link_rates import COMPUTE_SLOWDOWN, COPY_LATENCY_S
from fgoffload.units import GIB

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "planner.md").read_text(encoding="utf-8")
RESULTS = DOCS / "results" / "predictions_h200_202611.md"
FORMULA = re.compile(r"^\| `(\w+)`(?:, ([^|]*))? \| `([^`]+)` \|$", re.MULTILINE)
ERRORS = re.compile(
    r"^\| (?:\[|`)(\w[\w, ]*?)[]`][^|]*\| (\d+), (\w+) plans? \| (\S+)% \| (\S+)% \| (\S+)% \| (\S+)% \|$", re.MULTILINE
)
PAGES = {
    "llama3_8b_layers": (RESULTS, "llama3_8b_layers", "## From the hardware table", "## From profiles"),
    "mla_moe": (RESULTS, "mla_moe", "## From the hardware table", "## From profiles"),
    "W2": (RESULTS, "w2_moe", "## From the hardware table", "## From profiles"),
    "W2, on H100": (
        *(DOCS / "results" / "w2_moe_h100_202611.md", "w2_moe"),
        *("### From the hardware table of an H100", "### From the profile of the run on an H100"),
    ),
    "mla_moe, on H100": (
        *(DOCS / "results" / "w2_moe_h100_202611.md", "mla_moe"),
        *("### From the hardware table of an H100", "### From the profile of the run on an H100"),
    ),
    "llama3_8b_layers, on H100": (
        *(DOCS / "results" / "w2_moe_h100_202611.md", "llama3_8b_layers"),
        *("### From the hardware table of an H100", "### From the profile of the run on an H100"),
    ),
    "W2, 1F1B on two devices": (
        *(DOCS / "results" / "w2_1f1b_h100_202611.md", "w2_moe_1f1b"),
        *("### From the hardware table of two devices", "### From the profiles of two stages"),
    ),
}
"""By the first words of a row: where its measurements are."""
NUMBERS = {"no": 0, "one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}


def read_rows(page, model, heading):
    """Return setting, error of the step and error of the peak of each row of a table of the results."""
    section = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].partition("\n##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| 2026")]
    percent = re.compile(r"([-+][\d.]+)%")
    return [
        (setting, float(percent.search(step)[1]), float(percent.search(peak)[1]))
        for _, name, _, setting, _, step, _, peak in rows
        if name == f"`{model}`"
    ]


def test_it_is_read_in_ten_minutes():
    assert len(TEXT.split()) <= 1200


def test_its_formulas_are_rows_of_the_page_of_formulas():
    formulas = (DOCS / "formulas.md").read_text(encoding="utf-8")
    rows = FORMULA.findall(TEXT)
    assert len(rows) == 4
    assert [
        row for row in rows if not re.search(rf"^\| `{row[0]}` \| *{row[1]} *\| `{re.escape(row[2])}` \| \d", formulas, re.M)
    ] == []


def test_its_figures_are_those_of_the_code():
    parts, words = Efficiency(), " ".join(TEXT.split())
    for figure in (
        f"linears {parts.matmul}, ",
        f"experts' {parts.grouped_matmul}, ",
        f"attention {parts.attention_forward} and {parts.attention_backward}, ",
        f"NVLink {parts.nvlink:.2f}, ",
        f"network {parts.network:.2f}, ",
        f"({ASSUMED_MEMORY:.2f} * memory bandwidth)",
        f"H100s reach {HARDWARE['h100'].memory_efficiency}, strided kernels {parts.strided_bytes_per_s / 1e12} TB/s",
        f"+ {parts.kernel_start_s * 1e6:.0f} us stretch",
        f"+ {parts.collective_start_s * 1e6:.0f} us, for traffic",
        f">= {parts.host_s_per_launch * 1e6:.0f} us for each launch",
        f"{1 + parts.rerun_extra:.2f} * forward",
        f"{COPY_LATENCY_S * 1e6:.0f} us of latency and {COMPUTE_SLOWDOWN:.0%} of slowdown",
        f"+ {DEFAULT_RESERVE_BYTES // GIB} GiB reserve",
    ):
        assert figure in words


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("interleaved", 3)])
def test_its_forwards_are_those_of_the_schedules(schedule, chunks):
    (formula,) = re.findall(rf"^\| {schedule} \| (.*) \|$", TEXT, re.MULTILINE)
    spelled = re.sub(r"(?<=[\d)])(?=[a-z(])", "*", formula)
    for r in range(4):
        sizes = {"p": 4, "v": chunks, "g": 5, "r": r}
        pipeline = Pipeline(stages=4, microbatches=40, chunks=chunks, group_size=5 if chunks > 1 else None)
        assert eval(spelled, sizes) == count_warmup_passes(pipeline, rank=r)


def test_its_table_has_the_worst_errors_of_all_measurements():
    rows = ERRORS.findall(TEXT.replace("**", ""))
    assert [row[0] for row in rows] == list(PAGES)
    for name, settings, plans, *errors in rows:
        page, model, *headings = PAGES[name]
        table, profile = (read_rows(page, model, heading) for heading in headings)
        named = {setting for setting, _, _ in table}
        assert int(settings) == len(named)
        assert int(NUMBERS.get(plans, plans)) == sum("`plan:" in setting for setting in named)
        worst = [max((row[place] for row in found), key=abs) for found in (table, profile) for place in (1, 2)]
        assert [float(error) for error in errors] == worst
