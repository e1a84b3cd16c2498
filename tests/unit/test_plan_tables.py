"""The tables of `fgoffload plan`, against the simulation that they are made of."""

import functools

import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, OffloadPlan
from fgoffload.cli.plan_tables import (
    build_decision_table,
    build_kept_table,
)
from fgoffload.planner.planning import plan_ranks
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.units import format_bytes

ONE, OTHER = make_toy_layer(kind="one"), make_toy_layer(kind="other", sizes=(1, 12, 6, 4, 2))


@functools.cache
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


def leave_out(report, kind, tag):
    """Return the plan of a report without what it does about `tag` in layers of `kind`."""
    numbers = {slot.number for rank in report.ranks for slot in rank.chunks[0].layers if slot.model.kind == kind}
    actions = report.solution.plan.actions
    return OffloadPlan(actions={site: one for site, one in actions.items() if not (site.tag == tag and site.layer in numbers)})


def test_costs_and_reasons_are_those_of_a_step_without_the_row():
    report = make_report(budget_bytes=35, compute_slowdown=0.25)
    solution = report.solution
    for row in read_table(build_decision_table(report)):
        without = simulate(report.ranks, leave_out(report, row["layers of kind"], row["tag or unit"]))
        assert read_ms(row["costs"]) == pytest.approx(solution.result.step_s - without.step_s, abs=1e-4)
        lacking = max(0, without.peak_bytes - solution.budget_bytes)
        assert row["why"] == (
            f"without it rank 0 lacks {format_bytes(lacking)}" if lacking else "the budget holds without it too"
        )


def test_every_layer_and_tag_has_a_row_in_one_of_the_two_tables():
    report = make_report(budget_bytes=35)
    counts = {}
    for row in read_table(build_decision_table(report)):
        key = (row["layers of kind"], row["tag or unit"])
        counts[key] = counts.get(key, 0) + int(row["layers"])
    for row in read_table(build_kept_table(report)):
        assert row["why"]
        for tag in row["tags and units"].split(", "):
            counts[row["layers of kind"], tag] = counts.get((row["layers of kind"], tag), 0) + int(row["layers"])
    names = ("layer_input", "core_attn", "expert_fc1", "moe_act", "expert_fc2", "layer")
    assert counts == {(kind, name): 2 for kind in ("one", "other") for name in names}
