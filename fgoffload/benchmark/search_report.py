"""Shows what a search for Megatron-Core's flags tried, and what won at each budget."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.frontier import find_fastest
from fgoffload.benchmark.markdown import format_rows
from fgoffload.benchmark.measurement import Summary
from fgoffload.benchmark.report import ABSENT, note_missed
from fgoffload.benchmark.search import SearchResult
from fgoffload.benchmark.settings import Setting, System
from fgoffload.units import format_bytes

HEADINGS = (
    *("peak at most", "Megatron-Core, few steps: fastest", "over nothing", "peak"),
    *("all steps: fastest", "over nothing", "peak"),
)
"""Of the table."""

MEGATRONS = (System.RECOMPUTE, System.MEGATRON)
"""Systems that are Megatron-Core's own: what the search is of."""

CANDIDATES = 2
"""Settings of each budget that are measured again, with all steps: few steps do not tell apart what is nearly alike."""


def list_candidates(result: SearchResult) -> tuple[Setting, ...]:
    """Return the settings that are measured with all steps: what was found, and the same modules by this package's engine."""
    found = dict.fromkeys(one for budget in result.budgets_bytes for one in result.list_fastest(budget, count=CANDIDATES))
    ours = (dataclasses.replace(one, system=System.OURS) for one in found if one.system is System.MEGATRON)
    return (*found, *ours)


def build_search_table(result: SearchResult, summaries: Sequence[Summary]) -> Table:
    """Return for each budget the fastest that the search found, and the fastest of all that was measured with all steps.

    Args:
        result: Of the search.
        summaries: Of what was measured with all steps, whoever asked for it.
    """
    table = Table(title=Text("search for Megatron-Core's own flags"), title_justify="left", caption_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if "fastest" in heading else "right")
    for cells in _list_rows(result, summaries):
        table.add_row(*map(Text, cells))
    table.caption = Text(describe_search(result))
    return table


def format_search(result: SearchResult, summaries: Sequence[Summary]) -> str:
    """Return the page `search.md`: what won, and everything that was tried."""
    tried = [(one.name, f"{sample.ratio:.3f}", format_bytes(sample.peak_bytes)) for one, sample in result.samples.items()]
    tried += [(one.name, reason, ABSENT) for one, reason in result.failures.items()]
    tables = format_rows(HEADINGS, _list_rows(result, summaries)), format_rows(("tried", "over nothing", "peak"), tried)
    return "\n".join((describe_search(result), "", *tables[0], "", *tables[1], ""))


def describe_search(result: SearchResult) -> str:
    """Return one line: how many settings were tried of how many, and why it ended."""
    rounds = "1 round" if result.rounds == 1 else f"{result.rounds} rounds"
    if not result.samples:
        reason = next(iter(result.failures.values()), "none was tried").rstrip(".")
        return f"{result.tried} settings of {result.possible} tried in {rounds}, and none could be measured: {reason}."
    end = "nothing that was left promised to be faster" if result.is_exhausted else "its limit was reached"
    failed = f", {len(result.failures)} of them failed" if result.failures else ""
    return f"{result.tried} settings of {result.possible} tried in {rounds}{failed}; it ended since {end}."


def to_fields(result: SearchResult) -> dict[str, Any]:
    """Return the search for the JSON file."""
    return {
        "possible": result.possible,
        "tried": result.tried,
        "rounds": result.rounds,
        "is_exhausted": result.is_exhausted,
        "samples": {one.name: sample._asdict() for one, sample in result.samples.items()},
        "failures": {one.name: reason for one, reason in result.failures.items()},
        "fastest": {
            format_bytes(budget): [one.name for one in result.list_fastest(budget, count=CANDIDATES)]
            for budget in result.budgets_bytes
        },
    }


def _list_rows(result: SearchResult, summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    return [_list_cells(result, summaries, budget) for budget in sorted(result.budgets_bytes, reverse=True)]


def _list_cells(result: SearchResult, summaries: Sequence[Summary], budget_bytes: int) -> tuple[str, ...]:
    found, again = (ABSENT, ABSENT, ABSENT), (ABSENT, ABSENT, ABSENT)
    for setting in result.list_fastest(budget_bytes):
        sample = result.samples[setting]
        found = (setting.name, f"{sample.ratio:.3f}", format_bytes(sample.peak_bytes))
    # Not the same one measured again: with all steps it may no longer fit, and another one be faster.
    winner = find_fastest(summaries, systems=MEGATRONS, budget_bytes=budget_bytes)
    if winner is not None:
        again = (f"{winner.setting.name}{note_missed(winner)}", f"{winner.ratio:.3f}", format_bytes(winner.peak_bytes or 0))
    return (format_bytes(budget_bytes), *found, *again)
