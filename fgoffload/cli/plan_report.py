"""Makes a plan or a sweep, prints it and writes its files."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from fgoffload.cli.console import PipeConsole
from fgoffload.cli.errors import show_line
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
)
from fgoffload.errors import ConfigError
from fgoffload.output_files import write_file
from fgoffload.plan import NOTHING
from fgoffload.planner.entry import PlanReport, plan_ranks
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import Detail
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.solver import (
    DEFAULT_LAYER_PASSES,
    THOROUGH_LAYER_PASSES,
    Solution,
    find_least_budget,
    sweep,
)
from fgoffload.planner.timing.hardware import Hardware
from fgoffload.planner.training_facts import list_facts
from fgoffload.units import GIB, KIB, MIB, format_bytes

PATIENCE_S = 2.0
"""Seconds of work before a line of progress is printed."""
MOST_DRAWN_LAYERS = 200_000
"""Maximum number of layer passes in a picture or trace of a step. A trace of 64,000 took 22 seconds and 123 MB."""


def show_plan(
    console: Console,
    subject: Subject,
    ranks: Sequence[RankModel],
    checked: PlanOptions,
    *,
    budget_bytes: int,
    host_budget_bytes: int | None,
) -> None:
    """Plan, print the summary, and write the files. Budgets are per rank; None is no limit.

    Raises:
        ConfigError: A file cannot be written, or the step is too long to draw.
        PlanError: No plan fits.
    """
    check_drawn(ranks, checked)
    passes = THOROUGH_LAYER_PASSES if checked.is_thorough else DEFAULT_LAYER_PASSES
    with _working("planning"):
        report = plan_ranks(ranks, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, layer_passes=passes)
    solution = report.solution
    console.print(subject.title)
    console.print(build_summary_table(report, subject))
    notes = (describe_notes(report, subject), subject.link_line, describe_budget(subject, budget_bytes))
    for text in (*notes, describe_treatments(solution)):
        if text:
            console.print(text, highlight=False)
    if checked.is_verbose:
        with _working("pricing"):
            tables = [build_decision_table(report), build_kept_table(report)] if solution.plan.actions else []
        for table in (*tables, build_peak_table(report), build_rank_table(report)):
            console.print(table)
    if checked.json is not None:
        plan = dataclasses.replace(solution.plan, made_for=list_facts(subject.model, subject.parallelism))
        _write(checked.json, plan.to_json(predicted=list_prediction(report, subject)))
    console.print(describe_use(solution, checked.json), soft_wrap=True, highlight=False)
    if not checked.is_verbose and solution.plan.actions:
        console.print("--verbose shows each kind of layer, each rank, and why.")
    if checked.plot is not None or checked.timeline is not None:
        with _working("drawing"):
            _draw_step(report, checked, budget_bytes=budget_bytes, title=subject.title)


@contextlib.contextmanager
def _working(what: str) -> Iterator[None]:
    """Show a spinner on a terminal, and elsewhere a line if it takes more than two seconds."""
    bar = PipeConsole(stderr=True)
    if bar.is_terminal:
        with bar.status(what):
            yield
        return
    late = threading.Timer(PATIENCE_S, show_line, (f"{what} ...",))
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _draw_step(report: PlanReport, checked: PlanOptions, *, budget_bytes: int, title: str) -> None:
    """Write the picture and the trace of the rank that is fullest under the plan."""
    only = report.solution.result.worst_rank.rank
    detailed = simulate(report.ranks, report.solution.plan, detail=Detail.TIMELINE, only=only)
    if checked.plot is not None:
        baseline = simulate(report.ranks, NOTHING, detail=Detail.TIMELINE, only=only)
        results = {"baseline": baseline, PLAN: detailed}
        write_memory_picture(checked.plot, results, rank=only, budget_bytes=budget_bytes, title=title)
    if checked.timeline is not None:
        from fgoffload.planner.simulation.timeline import write_chrome_trace

        write_chrome_trace(detailed, checked.timeline, rank=only)


def check_drawn(ranks: Sequence[RankModel], checked: PlanOptions) -> None:
    """Refuse to draw a step with too many microbatches.

    Raises:
        ConfigError: With the number, the limit and the fix.
    """
    name = next((name for name in ("plot", "timeline") if getattr(checked, name) is not None), None)
    layers = sum(len(chunk.layers) * len(rank.passes) // len(rank.chunks) for rank in ranks for chunk in rank.chunks)
    if name is not None and layers > MOST_DRAWN_LAYERS:
        raise ConfigError(
            f"--{name} would draw {layers} layer passes, above {MOST_DRAWN_LAYERS}. Give a smaller --global-batch-size, since "
            f"microbatches look alike, or leave --{name} out."
        )


def show_sweep(
    console: Console,
    subject: Subject,
    ranks: Sequence[RankModel],
    checked: PlanOptions,
    *,
    points: int,
    host_budget_bytes: int | None,
) -> None:
    """Plan for `points` budgets and the peaks of the baselines, print the frontier, and write its files.

    Raises:
        ConfigError: A file cannot be written.
    """
    with _working("looking for the smallest budget"):
        least_bytes = find_least_budget(ranks, host_budget_bytes=host_budget_bytes)
        report = plan_ranks(ranks, budget_bytes=10**18, host_budget_bytes=host_budget_bytes)
    most_bytes = report.baselines["baseline"].peak_bytes
    steps = max(1, points - 1)
    even = {least_bytes + (most_bytes - least_bytes) * point // steps for point in range(points)}
    # The frontier may fall steeply between two budgets, so each baseline's peak is a budget too.
    same = {result.peak_bytes for result in report.baselines.values() if least_bytes < result.peak_bytes < most_bytes}
    budgets = sorted(even | same)
    found = sweep(ranks, budgets, host_budget_bytes=host_budget_bytes)
    bar = PipeConsole(stderr=True)
    shown = track(found, "planning", total=len(budgets), console=bar, transient=True, disable=not bar.is_terminal)
    with contextlib.nullcontext() if bar.is_terminal else _working(f"planning for {len(budgets)} budgets"):
        solutions = list(shown)[::-1]
    console.print(build_sweep_table(report.baselines, solutions, subject))
    if subject.link_line:
        console.print(subject.link_line, soft_wrap=True)
    console.print(describe_budget(subject, None), soft_wrap=True)
    if subject.hardware is not None:
        console.print(describe_fitting(subject.hardware, solutions), soft_wrap=True)
    if checked.json is not None:
        _write(checked.json, json.dumps(list_sweep(report.baselines, solutions, subject), indent=1))
    if checked.plot is not None:
        write_sweep_picture(checked.plot, report.baselines, solutions, title=subject.title)
        # matplotlib adds a missing suffix.
        console.print(f"Frontier: {checked.plot}{'' if checked.plot.suffix else '.png'}", soft_wrap=True)


def describe_budget(subject: Subject, budget_bytes: int | None) -> str:
    """Return one line about the budget, None for a sweep: its parts, the flag for a training run, and the host budget."""
    reserve = f"a reserve of {format_bytes(subject.reserve_bytes)} (CUDA context, NCCL, fragmentation)"
    at_run_time = "; for a training run, give --offload-modules auto --offload-memory-budget" if subject.takes_auto else ""
    if budget_bytes is None:
        text = f"Each budget includes {reserve}{at_run_time and f'{at_run_time} that much less'}"
    else:
        handed_out = budget_bytes - subject.reserve_bytes
        rest = f"{format_bytes(handed_out)} for the allocator"
        text = f"The budget includes {reserve} and {rest}{at_run_time and f'{at_run_time} {_spell(handed_out)}'}"
    return f"{text}. Host budget: {subject.host_budget}."


def describe_fitting(hardware: Hardware, solutions: Sequence[Solution]) -> str:
    """Return how many budgets of a sweep fit the device."""
    memory_bytes = hardware.device_memory_bytes
    fitting = sum(solution.budget_bytes <= memory_bytes for solution in solutions)
    room = f"{hardware.name} has {format_bytes(memory_bytes)}, enough for"
    if fitting == len(solutions):
        return f"{room} all of these budgets."
    if fitting:
        return f"{room} {fitting} of these {len(solutions)} budgets."
    return f"{room} none of these budgets. Spread the model over more ranks, or name a larger device."


def _spell(size_bytes: int) -> str:
    """Return a size as flags take it, exact to the byte."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"


def _write(path: Path, text: str) -> None:
    try:
        write_file(path, text + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}. Give another file.") from error
