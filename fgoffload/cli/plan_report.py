"""Computes a plan or a sweep, prints it, and writes the output files."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fgoffload.cli.console import show_working
from fgoffload.cli.plan_options import PlanOptions
from fgoffload.cli.plan_pictures import write_memory_picture, write_sweep_picture
from fgoffload.cli.plan_summary import (
    build_summary_table,
    describe_notes,
    describe_treatments,
    describe_use,
    list_prediction,
    list_sweep,
)
from fgoffload.cli.plan_tables import (
    PLAN,
    Subject,
    build_decision_table,
    build_kept_table,
    build_peak_table,
    build_rank_table,
    build_sweep_table,
    find_uncertainty,
)
from fgoffload.errors import ConfigError
from fgoffload.output_files import write_file
from fgoffload.plan import NOTHING
from fgoffload.planner.entry import PlanReport, plan_ranks
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import Detail
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.solver import DEFAULT_LAYER_PASSES, THOROUGH_LAYER_PASSES, find_least_budget, sweep
from fgoffload.planner.training_facts import list_facts
from fgoffload.units import GIB, format_bytes


def show_plan(
    console: Console,
    subject: Subject,
    ranks: Sequence[RankModel],
    checked: PlanOptions,
    *,
    budget_bytes: int,
    host_budget_bytes: int | None,
) -> None:
    """Plan, print the summary, and write the files. Budgets are per rank; None means no limit.

    Raises:
        PlanError: No plan fits the budgets.
    """
    passes = THOROUGH_LAYER_PASSES if checked.thorough else DEFAULT_LAYER_PASSES
    with show_working("planning"):
        report = plan_ranks(ranks, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, layer_passes=passes)
    solution = report.solution
    console.print(subject.title)
    console.print(build_summary_table(report, subject))
    notes = (describe_notes(report, subject), subject.link_line, describe_budget(subject, budget_bytes))
    for text in (*notes, describe_treatments(solution)):
        if text:
            console.print(text, highlight=False)
    if checked.verbose:
        with show_working("computing costs"):
            tables = [build_decision_table(report), build_kept_table(report)] if solution.plan.actions else []
        for table in (*tables, build_peak_table(report, subject), build_rank_table(report, subject)):
            console.print(table)
    if checked.json is not None:
        plan = dataclasses.replace(solution.plan, made_for=list_facts(subject.model, subject.parallelism))
        _write(checked.json, plan.to_json(predicted=list_prediction(report, subject)))
    console.print(describe_use(solution, checked.json), soft_wrap=True, highlight=False)
    if not checked.verbose and solution.plan.actions:
        console.print("--verbose adds the cost and reason of each action, and the peak of each rank.")
    if checked.plot is not None or checked.timeline is not None:
        with show_working("drawing"):
            _draw_step(
                report, checked, budget_bytes=budget_bytes, title=f"{subject.title}; step ±{find_uncertainty(subject):.0%}"
            )


def _draw_step(report: PlanReport, checked: PlanOptions, *, budget_bytes: int, title: str) -> None:
    """Write the plot and the trace of the rank that has the highest peak under the plan."""
    only = report.solution.result.worst_rank.rank
    detailed = simulate(report.ranks, report.solution.plan, detail=Detail.TIMELINE, only=only)
    if checked.plot is not None:
        baseline = simulate(report.ranks, NOTHING, detail=Detail.TIMELINE, only=only)
        results = {"baseline": baseline, PLAN: detailed}
        write_memory_picture(checked.plot, results, rank=only, budget_bytes=budget_bytes, title=title)
    if checked.timeline is not None:
        from fgoffload.planner.simulation.timeline import write_chrome_trace

        write_chrome_trace(detailed, checked.timeline, rank=only)


def show_sweep(
    console: Console,
    subject: Subject,
    ranks: Sequence[RankModel],
    checked: PlanOptions,
    *,
    points: int,
    host_budget_bytes: int | None,
) -> None:
    """Plan for `points` evenly spaced budgets and each baseline's peak, print the table, and write the files."""
    with show_working("finding the smallest budget"):
        least_bytes = find_least_budget(ranks, host_budget_bytes=host_budget_bytes)
        report = plan_ranks(ranks, budget_bytes=10**18, host_budget_bytes=host_budget_bytes)
    most_bytes = report.baselines["baseline"].peak_bytes
    steps = max(1, points - 1)
    even = {least_bytes + (most_bytes - least_bytes) * point // steps for point in range(points)}
    # Step time can drop steeply between two budgets, so plan for each baseline's peak too.
    peaks = {result.peak_bytes for result in report.baselines.values() if least_bytes < result.peak_bytes < most_bytes}
    # If several budgets look the same in the table, plan only for the largest of them.
    budgets = list({format_bytes(size): size for size in sorted(even | peaks)}.values())
    with show_working(f"planning for {len(budgets)} budgets"):
        solutions = list(sweep(ranks, budgets, host_budget_bytes=host_budget_bytes))[::-1]
    console.print(build_sweep_table(report.baselines, solutions, subject))
    if subject.link_line:
        console.print(subject.link_line, soft_wrap=True)
    console.print(describe_budget(subject, None), soft_wrap=True)
    if (hardware := subject.hardware) is not None:
        fitting = sum(solution.budget_bytes <= hardware.device_memory_bytes for solution in solutions)
        memory = f"{hardware.name}: {format_bytes(hardware.device_memory_bytes)}"
        console.print(f"{fitting} of these {len(solutions)} budgets fit in GPU memory ({memory}).", soft_wrap=True)
    if checked.json is not None:
        _write(checked.json, json.dumps(list_sweep(report.baselines, solutions, subject), indent=1))
    if checked.plot is not None:
        write_sweep_picture(checked.plot, report.baselines, solutions, title=subject.title)
        console.print(f"Plot: {checked.plot}", soft_wrap=True)


def describe_budget(subject: Subject, budget_bytes: int | None) -> str:
    """Describe the parts of the budget, the flags for training, and the host budget. `budget_bytes` is None for a sweep."""
    reserve = f"a reserve of {format_bytes(subject.reserve_bytes)} (CUDA context, NCCL, fragmentation)"
    if budget_bytes is None:
        text, size = f"Each budget includes {reserve}", "SIZE, where SIZE excludes the reserve"
    else:
        allocated_bytes = budget_bytes - subject.reserve_bytes
        text = f"The budget includes {reserve} and {format_bytes(allocated_bytes)} for the allocator"
        size = f"{allocated_bytes / GIB:.6g}GiB"
    if subject.takes_auto:
        text += f". For --offload-modules auto, use --offload-memory-budget {size}"
    return f"{text}. Host budget: {subject.host_budget}."


def _write(path: Path, text: str) -> None:
    try:
        write_file(path, text + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}. Use another file.") from error
