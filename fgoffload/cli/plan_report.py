"""Shows a plan: what it is predicted to come to beside what users would pick instead, and what it does, tag by tag."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fgoffload.cli.plan_pictures import write_memory_picture, write_sweep_picture
from fgoffload.errors import ConfigError
from fgoffload.plan import Action
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.model_ranks import count_host_bytes_per_node
from fgoffload.planner.plan_facts import list_facts
from fgoffload.planner.planning import PlanReport, plan_ranks
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulation_result import Detail, RankResult, StepResult
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.flag_search import NearestFlags
from fgoffload.planner.solving.prices import price_decisions
from fgoffload.planner.solving.reasons import Decision
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.solver import Solution, find_least_budget, sweep
from fgoffload.planner.timing.hardware import Hardware
from fgoffload.planner.worker_processes import map_in_processes
from fgoffload.units import GIB, KIB, MIB, format_bytes, format_ms

MOST_DRAWN_LAYERS = 200_000
"""Layers that a step runs through, forward and backward, in a picture or a trace of it: a trace of 64 000 took 22 seconds and
123 MB, and no eye follows more."""

PLAN = "this plan"
"""The row of the plan itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What was planned for, for the lines around the numbers."""

    model: ModelShape
    parallelism: Parallelism
    hardware: Hardware | None
    """None where a profile says what the device does."""
    device: str
    """What a rank runs on, by name."""
    reserve_bytes: int
    """Of each device: counted as static memory, and not handed out by the allocator of a training."""
    host_budget: str
    """The host budget of a rank, and where it comes from, as the end of a line."""

    @property
    def title(self) -> str:
        """One line: the model, its ranks and the device."""
        sizes = self.parallelism
        parts = [f"tp {sizes.tensor_parallel_size}", f"pp {sizes.pipeline_parallel_size}"]
        for name, size in (
            ("vp", sizes.chunks),
            ("cp", sizes.context_parallel_size),
            ("ep", sizes.expert_parallel_size),
            ("dp", sizes.data_parallel_size),
        ):
            parts += [f"{name} {size}"] if size > 1 else []
        count = sizes.microbatches
        return (
            f"{self.model.name}: {self.model.num_layers} layers, {' '.join(parts)}, {sizes.world_size} x {self.device}; "
            f"{count} microbatch{'es' if count > 1 else ''} of {sizes.micro_batch_size} x {self.model.seq_length}"
        )


def show_plan(
    console: Console,
    subject: Subject,
    ranks: Sequence[RankModel],
    *,
    budget_bytes: int,
    host_budget_bytes: int | None,
    files: Mapping[str, Path | None],
    limits: SearchLimits | None = None,
) -> None:
    """Plan, print the tables, and write the files.

    Args:
        console: Where tables go.
        subject: What is planned for.
        ranks: All pipeline ranks.
        budget_bytes: Of each device.
        host_budget_bytes: Of each rank; None for no limit.
        files: By name of the option, `json`, `plot` and `timeline`: where to write, or None.
        limits: How long to look for a plan.

    Raises:
        ConfigError: A file cannot be written, or the step is too long for one that draws it.
        PlanError: No plan was found that fits.
    """
    check_drawn(ranks, files)
    report = plan_ranks(ranks, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes, limits=limits)
    console.print(build_prediction_table(report, subject))
    console.print(describe_budget(subject, budget_bytes), soft_wrap=True)
    if report.solution.plan.actions:
        console.print(build_decision_table(report))
        console.print(build_kept_table(report))
    else:
        console.print("Everything is kept: the budget holds as it is.")
    if len(ranks) > 1:
        console.print(build_rank_table(report))
    console.print(describe_flags(report.solution.nearest, report.solution.result))
    if (path := files["json"]) is not None:
        _write(
            path, dataclasses.replace(report.solution.plan, made_for=list_facts(subject.model, subject.parallelism)).to_json()
        )
        console.print(describe_plan_file(path, report.solution), soft_wrap=True)
    if files["plot"] is not None or files["timeline"] is not None:
        detailed = simulate(report.ranks, report.solution.plan, detail=Detail.TIMELINE)
        if (path := files["plot"]) is not None:
            kept = simulate(report.ranks, type(report.solution.plan)(actions={}), detail=Detail.TIMELINE)
            write_memory_picture(path, {"nothing": kept, PLAN: detailed}, budget_bytes=budget_bytes, title=subject.title)
        if (path := files["timeline"]) is not None:
            from fgoffload.planner.simulation.timeline import write_chrome_trace

            write_chrome_trace(detailed, path)


def check_drawn(ranks: Sequence[RankModel], files: Mapping[str, Path | None]) -> None:
    """Refuse to draw a step of very many microbatches, whose passes all are simulated and noted then.

    Args:
        ranks: All pipeline ranks.
        files: By name of the option: where to write, or None.

    Raises:
        ConfigError: With the number, the limit and the fix.
    """
    name = next((name for name in ("plot", "timeline") if files[name] is not None), None)
    layers = sum(len(chunk.layers) * len(rank.passes) // len(rank.chunks) for rank in ranks for chunk in rank.chunks)
    if name is not None and layers > MOST_DRAWN_LAYERS:
        raise ConfigError(
            f"--{name} would draw {layers} layers of a step, forward and backward, above {MOST_DRAWN_LAYERS}. "
            f"Give a smaller --global-batch-size, whose microbatches look the same, or leave --{name} out."
        )


def show_sweep(
    console: Console,
    subject: Subject,
    ranks: Sequence[RankModel],
    *,
    points: int,
    host_budget_bytes: int | None,
    plot: Path | None,
) -> None:
    """Plan for many budgets, print the frontier, and write its picture.

    Args:
        console: Where the table goes.
        subject: What is planned for.
        ranks: All pipeline ranks.
        points: How many budgets.
        host_budget_bytes: Of each rank; None for no limit.
        plot: Where to write the picture, or None.

    Raises:
        ConfigError: The picture cannot be written.
    """
    least_bytes = find_least_budget(ranks, host_budget_bytes=host_budget_bytes)
    report = plan_ranks(ranks, budget_bytes=10**18, host_budget_bytes=host_budget_bytes)
    most_bytes = report.baselines["nothing"].peak_bytes
    steps = max(1, points - 1)
    budgets = sorted({least_bytes + (most_bytes - least_bytes) * point // steps for point in range(points)}, reverse=True)
    solutions = sweep(ranks, budgets, host_budget_bytes=host_budget_bytes)
    console.print(build_sweep_table(report.baselines, solutions, subject))
    console.print(describe_budget(subject, None), soft_wrap=True)
    if subject.hardware is not None:
        console.print(describe_fitting(subject.hardware, solutions), soft_wrap=True)
    if plot is not None:
        write_sweep_picture(plot, report.baselines, solutions, title=subject.title)


def build_prediction_table(report: PlanReport, subject: Subject) -> Table:
    """Return a row for each way that users compare, and one for the plan."""
    solution = report.solution
    fraction = f"budget {format_bytes(solution.budget_bytes)} a device"
    table = Table(title=subject.title, caption=f"{fraction}; predicted, of the worst rank", title_justify="left")
    table.add_column("")
    for heading in ("peak", "on rank", "step", "over nothing", "host, fullest rank", "host, fullest node", "fits"):
        table.add_column(heading, justify="right")
    nothing_s = report.baselines["nothing"].step_s
    for name, result in {**report.baselines, PLAN: solution.result}.items():
        fits = result.peak_bytes <= solution.budget_bytes
        host_bytes = [rank.host_peak_bytes for rank in result.ranks]
        node = "-"
        if subject.hardware is not None and max(host_bytes):
            world_size = subject.parallelism.world_size
            node = format_bytes(count_host_bytes_per_node(host_bytes, hardware=subject.hardware, world_size=world_size))
        table.add_row(
            Text(name, style="bold" if name == PLAN else ""),
            format_bytes(result.peak_bytes),
            str(result.worst_rank.rank),
            format_ms(result.step_s),
            f"{result.step_s / nothing_s:.3f}",
            format_bytes(max(host_bytes)) if max(host_bytes) else "-",
            node,
            Text("yes", style="green") if fits else Text("no", style="red"),
            end_section=name == list(report.baselines)[-1],
        )
    return table


def build_decision_table(report: PlanReport) -> Table:
    """Return a row for each tag, kind of layer and action other than keeping: what it moves, what it costs, and why."""
    table = Table(
        title="What the plan does",
        caption="frees, leaves and recompute: of one microbatch and layer; copies: of a step, all ranks; "
        "costs: the step with it, less the step without it",
    )
    for heading in ("layers of kind", "tag or unit", "action"):
        table.add_column(heading)
    for heading in ("layers", "frees", "leaves", "recompute", "copies hidden", "exposed", "costs"):
        table.add_column(heading, justify="right")
    table.add_column("why")
    solution = report.solution
    moved = _sum_copies(solution.result.ranks)
    groups: dict[tuple[str, str, Action], list[Decision]] = {}
    for decision in solution.decisions:
        if decision.action is not Action.KEEP:
            groups.setdefault((decision.kind, decision.tag, decision.action), []).append(decision)
    get_price = functools.partial(
        price_decisions, report.ranks, solution.plan, solution.result, budget_bytes=solution.budget_bytes
    )
    prices = map_in_processes(get_price, groups.values())
    for ((kind, tag, action), decisions), price in zip(groups.items(), prices, strict=True):
        copies = moved.get((kind, tag, action))
        table.add_row(
            kind,
            tag,
            action.value,
            str(sum(len(decision.layers) for decision in decisions)),
            _format_range((decision.freed_bytes for decision in decisions), format_bytes),
            _format_range((decision.moved_bytes for decision in decisions), format_bytes),
            _format_range((decision.recompute_s for decision in decisions), format_ms),
            format_ms(copies[0]) if copies else "-",
            format_ms(copies[1]) if copies else "-",
            "?" if price is None else _format_cost(price.cost_s),
            "what else the plan does there needs it" if price is None else price.describe(),
        )
    return table


def build_kept_table(report: PlanReport) -> Table:
    """Return what stays as it is, and why: a row for tags and units of a kind that do so in as many layers for one reason."""
    table = Table(title="What it keeps")
    for heading in ("layers of kind", "tags and units"):
        table.add_column(heading)
    table.add_column("layers", justify="right")
    table.add_column("why")
    counts: dict[tuple[str, str, str], int] = {}
    for decision in report.solution.decisions:
        if decision.action is Action.KEEP:
            key = (decision.kind, decision.reason, decision.tag)
            counts[key] = counts.get(key, 0) + len(decision.layers)
    rows: dict[tuple[str, str, int], list[str]] = {}
    for (kind, reason, tag), count in counts.items():
        rows.setdefault((kind, reason, count), []).append(tag)
    for (kind, reason, count), tags in rows.items():
        table.add_row(kind, ", ".join(tags), str(count), reason.partition(": ")[2])
    return table


def build_rank_table(report: PlanReport) -> Table:
    """Return a row for each pipeline rank."""
    table = Table(title="By pipeline rank")
    headings = (
        "rank",
        "layers",
        "static",
        "peak",
        "step",
        "compute",
        "slowed by copies",
        "waits for copies",
        "for neighbours",
        "host",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("peak at")
    for rank, result in zip(report.ranks, report.solution.result.ranks, strict=True):
        table.add_row(
            str(rank.rank),
            str(sum(len(chunk.layers) for chunk in rank.chunks)),
            format_bytes(result.static_bytes),
            format_bytes(result.peak_bytes),
            format_ms(result.step_s),
            format_ms(result.compute_s),
            format_ms(result.slowed_s),
            format_ms(result.waits.copies_s),
            format_ms(result.waits.neighbours_s),
            format_bytes(result.host_peak_bytes) if result.host_peak_bytes else "-",
            result.peak_at,
        )
    return table


def build_sweep_table(baselines: Mapping[str, StepResult], solutions: Sequence[Solution], subject: Subject) -> Table:
    """Return a row for each budget, from the largest to the smallest, below what users would pick instead."""
    table = Table(title=subject.title, caption="predicted, of the worst rank", title_justify="left")
    table.add_column("")
    for heading in ("budget", "peak", "step", "over nothing", "leaves a step", "recompute", "waits for copies"):
        table.add_column(heading, justify="right")
    nothing_s = baselines["nothing"].step_s
    for name, result in baselines.items():
        table.add_row(name, "", *_list_sweep_cells(result, nothing_s), end_section=name == list(baselines)[-1])
    for solution in solutions:
        table.add_row("plan", format_bytes(solution.budget_bytes), *_list_sweep_cells(solution.result, nothing_s))
    return table


def describe_flags(nearest: NearestFlags | None, planned: StepResult) -> Text:
    """Return Megatron's own flags that come nearest, and what they lose against the plan."""
    if nearest is None:
        return Text("No setting of Megatron's own flags keeps to the budget.")
    words = " ".join(nearest.flags.list_arguments())
    if not words:
        return Text("Megatron's own flags: none are needed.")
    result = nearest.result
    longer = f"{result.step_s / planned.step_s - 1:+.1%} over the plan"
    peak = f"{(result.peak_bytes - planned.peak_bytes) / GIB:+.2f} GiB of peak"
    return Text(f"Megatron's own flags that come nearest: {words}\nThey take {format_ms(result.step_s)}, {longer}, and {peak}.")


def describe_budget(subject: Subject, budget_bytes: int | None) -> str:
    """Return what a budget comprises, what to give for it at run time, and the host budget, in one line.

    Args:
        subject: With the reserve and the host budget.
        budget_bytes: Of each device; None where there are many.
    """
    reserve = f"{format_bytes(subject.reserve_bytes)} of reserve (contexts, communication, fragments)"
    at_run_time = "--offload-modules auto --offload-memory-budget"
    if budget_bytes is None:
        text = f"A budget comprises {reserve}; at run time give {at_run_time} that much less."
    else:
        handed_out = budget_bytes - subject.reserve_bytes
        rest = f"{format_bytes(handed_out)} that the allocator hands out; at run time give {at_run_time} {_spell(handed_out)}."
        text = f"The budget comprises {reserve} and {rest}"
    return f"{text} Host budget: {subject.host_budget}."


def describe_fitting(hardware: Hardware, solutions: Sequence[Solution]) -> str:
    """Return how many of the budgets of a sweep a device has room for."""
    memory_bytes = hardware.device_memory_bytes
    fitting = sum(solution.budget_bytes <= memory_bytes for solution in solutions)
    room = f"{hardware.name} has {format_bytes(memory_bytes)}: room for"
    if fitting == len(solutions):
        return f"{room} all of these budgets."
    if fitting:
        return f"{room} {fitting} of these {len(solutions)} budgets, and not for those above."
    return f"{room} none of these budgets. Spread the model over more ranks, or name a larger device."


def _spell(size_bytes: int) -> str:
    """Return a size as flags take it, to the byte."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"


def describe_plan_file(path: Path, solution: Solution) -> str:
    """Return what to do with the plan that was written."""
    if not solution.plan.actions:
        return f"The plan in {path} has no rows: a training that keeps everything needs neither it nor a flag of offload."
    return f"The plan: --fine-grained-activation-offloading --offload-plan {path}"


def _format_range(numbers: Iterable[float], write: Callable[[float], str]) -> str:
    """Return a number in words, or the least and the most where layers of one kind differ by what else they do."""
    found = sorted(numbers)
    ends = dict.fromkeys((write(found[0]), write(found[-1])))
    return " to ".join(ends) if any(found) else "-"


def _format_cost(seconds: float) -> str:
    text = format_ms(seconds)
    return f"+{text}" if seconds > 0 and text != format_ms(0) else text.replace("-0.0 ", "0.0 ")


def _list_sweep_cells(result: StepResult, nothing_s: float) -> tuple[str, ...]:
    moved_bytes = max(rank.d2h_bytes for rank in result.ranks)
    recompute_s = max(rank.recompute_s for rank in result.ranks)
    waits_s = max(rank.waits.copies_s for rank in result.ranks)
    return (
        format_bytes(result.peak_bytes),
        format_ms(result.step_s),
        f"{result.step_s / nothing_s:.3f}",
        format_bytes(moved_bytes) if moved_bytes else "-",
        format_ms(recompute_s) if recompute_s else "-",
        format_ms(waits_s) if waits_s else "-",
    )


def _sum_copies(ranks: Sequence[RankResult]) -> dict[tuple[str, str, Action], tuple[float, float]]:
    """Return the hidden and the exposed seconds of copies over all ranks, by kind of layer, tag and action."""
    found: dict[tuple[str, str, Action], tuple[float, float]] = {}
    for one in (tag for rank in ranks for tag in rank.tags):
        hidden_s, exposed_s = found.get((one.kind, one.tag, one.action), (0.0, 0.0))
        found[one.kind, one.tag, one.action] = (hidden_s + one.hidden_s, exposed_s + one.exposed_s)
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}. Give another file.") from error
