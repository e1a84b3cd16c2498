"""The tables of `fgoffload plan`, against the simulation that they are made of."""

import dataclasses

import pytest
from support.toy_ranks import make_toy_layer, make_toy_rank

from fgoffload import Action, OffloadPlan, PlanError
from fgoffload.cli.plan_tables import (
    Subject,
    build_decision_table,
    build_kept_table,
    build_peak_table,
    build_prediction_table,
    build_rank_table,
)
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.planning import plan_ranks
from fgoffload.planner.ranks.rank_model import LinkModel
from fgoffload.planner.ranks.schedule import Pipeline
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import choose_usual_modules
from fgoffload.units import format_bytes, format_ms

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


def test_the_table_names_the_modules_of_selective_recompute():
    report = make_report(budget_bytes=35)
    subject = Subject(
        model=ModelShape(
            name="toy",
            num_layers=4,
            hidden_size=8,
            ffn_hidden_size=8,
            num_attention_heads=1,
            num_query_groups=1,
            kv_channels=8,
            vocab_size=8,
            seq_length=8,
        ),
        parallelism=Parallelism(),
        hardware=None,
        node=None,
        device="toy",
        reserve_bytes=0,
        host_budget="none",
    )
    modules = " ".join(choose_usual_modules(report.ranks))
    assert build_prediction_table(report, subject).caption.endswith(f"selective recompute is --recompute-modules {modules}")


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


def test_what_hides_and_slows_compute_is_no_free_copy():
    slowed, free = (make_report(budget_bytes=55, bytes_per_s=16.0, compute_slowdown=part) for part in (0.25, 0.0))
    for report, is_free in ((slowed, False), (free, True)):
        hidden = [row for row in read_table(build_decision_table(report)) if row["exposed"] == "0.0 ms"]
        assert hidden
        assert all((row["costs"] == "0.0 ms") is is_free for row in hidden)


def test_rows_that_run_again_say_what_they_free():
    report = make_report(budget_bytes=33)
    again = [row for row in read_table(build_decision_table(report)) if Action(row["action"]).recomputes]
    assert [(row["layers of kind"], row["tag or unit"], row["frees"]) for row in again] == [
        ("one", "moe_act", "6 B"),
        ("other", "moe_act", "6 B"),
    ]


def test_a_row_whose_layers_differ_says_from_what_to_what():
    report = make_report(budget_bytes=35)
    first = next(one for one in report.solution.decisions if one.action is Action.OFFLOAD)
    other = dataclasses.replace(first, freed_bytes=first.freed_bytes + 2)
    decisions = (other, *report.solution.decisions)
    row, *_ = read_table(
        build_decision_table(dataclasses.replace(report, solution=dataclasses.replace(report.solution, decisions=decisions)))
    )
    assert row["frees"] == f"{first.freed_bytes} B to {other.freed_bytes} B"
    assert row["leaves"] == f"{first.moved_bytes} B"


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


def test_every_rank_shows_its_peak_in_each_way_and_the_last_row_the_step_of_all():
    ranks = [
        make_toy_rank(
            rank=rank, layers=[[ONE] * (2 - rank)], first_number=2 * rank, pipeline=Pipeline(stages=2, microbatches=3)
        )
        for rank in range(2)
    ]
    report = plan_ranks(ranks, budget_bytes=60)
    *of_ranks, steps = read_table(build_peak_table(report))
    ways = {name: report.baselines[name] for name in ("nothing", "full recompute", "selective recompute")}
    ways["this plan"] = report.solution.result
    assert [list(row)[3:7] for row in (*of_ranks, steps)] == [list(ways)] * 3
    for place, row in enumerate(of_ranks):
        peaks = {name: format_bytes(result.ranks[place].peak_bytes) for name, result in ways.items()}
        assert {name: row[name] for name in ways} == peaks
        assert (row["rank"], row["layers"]) == (str(place), str(2 - place))
    assert len({row["nothing"] for row in of_ranks}) == 2
    assert (steps["rank"], {name: steps[name] for name in ways}) == (
        "step",
        {name: format_ms(result.step_s) for name, result in ways.items()},
    )
    assert [row["rank"] for row in read_table(build_rank_table(report))] == ["0", "1"]


def test_a_budget_below_static_memory_says_what_is_missing_where_and_what_would_do():
    rank = make_toy_rank(static_bytes=1000)
    with pytest.raises(PlanError) as caught:
        plan_ranks([rank], budget_bytes=900)
    text = str(caught.value)
    assert "static memory of pipeline rank 0" in text
    assert "That rank lacks 100 B between steps" in text
    least_bytes = int(text.split("that a plan was found for is ")[1].split(" ")[0])
    assert plan_ranks([rank], budget_bytes=least_bytes).solution.result.peak_bytes == least_bytes
    with pytest.raises(PlanError):
        plan_ranks([rank], budget_bytes=least_bytes - 1)


def test_baselines_keep_to_the_host_budget_too():
    free, bounded = (plan_ranks([make_toy_rank()], budget_bytes=10**6, host_budget_bytes=budget) for budget in (None, 3))
    assert free.baselines["offload everything"].ranks[0].host_peak_bytes > 3
    assert bounded.baselines["offload everything"].ranks[0].host_peak_bytes <= 3
    assert [rank.host_budget_bytes for rank in bounded.ranks] == [3]
