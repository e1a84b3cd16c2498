"""The tables of `fgoffload plan`, against the simulation that they are made of."""

import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action
from fgoffload.cli.plan_report import build_decision_table
from fgoffload.planner.planning import plan_ranks
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.ranks.schedule import Pipeline

ONE, OTHER = make_toy_layer(kind="one"), make_toy_layer(kind="other", sizes=(1, 12, 6, 4, 2))


def make_report(*, budget_bytes, bytes_per_s=2.0, **link):
    """Return a plan for one rank that has two layers of either kind."""
    rank = make_toy_rank(
        layers=[[ONE, ONE, OTHER, OTHER]],
        pipeline=Pipeline(microbatches=3),
        link=LinkModel(d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s, duplex_bytes_per_s=bytes_per_s, **link),
    )
    return plan_ranks([rank], budget_bytes=budget_bytes)


def read_table(table):
    """Return the rows of a table, each as its cells by heading."""
    headings = [column.header for column in table.columns]
    columns = [list(column.cells) for column in table.columns]
    return [dict(zip(headings, map(str, cells), strict=True)) for cells in zip(*columns, strict=True)]


def read_ms(cell):
    return 0.0 if cell == "-" else float(cell.removesuffix(" ms")) / 1e3


def test_copies_are_counted_in_one_row_each():
    report = make_report(budget_bytes=35)
    rows = read_table(build_decision_table(report))
    (rank,) = report.solution.result.ranks
    tags = [row["tag or unit"] for row in rows if Action(row["action"]).offloads]
    assert len(tags) > len(set(tags))  # of both kinds, so that one could count for the other
    total_s = sum(read_ms(row[name]) for row in rows for name in ("copies hidden", "exposed"))
    assert total_s == pytest.approx(rank.d2h_s + rank.h2d_s, abs=1e-3)
