"""The tables of `fgoffload plan`."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.table import Table

from fgoffload.plan import Action
from fgoffload.planner.entry import PlanReport
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.simulation.simulation_result import RankResult, StepResult
from fgoffload.planner.solving.decisions import Decision, price_decisions
from fgoffload.planner.solving.solver import Solution
from fgoffload.planner.timing.hardware import Hardware
from fgoffload.units import format_bytes, format_ms

PLAN = "this plan"
"""Name of the plan's row."""
COMPARED = ("baseline", "full recompute", "selective recompute")
"""The baselines shown by pipeline rank."""


PROFILE_UNCERTAINTY, DENSE_UNCERTAINTY, EXPERTS_UNCERTAINTY = 0.04, 0.15, 0.25
"""Relative uncertainty of a predicted step: from a profile, and from the hardware table for models without and with experts.
Four of five steps are closer. Source: docs/results/predictions.md and its published steps."""
OVERHEAD_NOISE = 0.02
"""Overheads closer to 1 are noise. Most errors of two steps of one training are the same, and cancel."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The planned training, for titles and captions."""

    model: ModelShape
    parallelism: Parallelism
    hardware: Hardware | None
    """Hardware of the device; None with a profile of a training."""
    node: Hardware | None
    """Hardware of a node's devices: `hardware`, or the profiled device if the table has it."""
    device: str
    """Name of the device."""
    reserve_bytes: int
    """Reserve of each device: counted as static memory, outside the allocator."""
    host_budget: str
    """The host budget of a rank and its source, as text."""
    takes_auto: bool = True
    """Whether `--offload-modules auto` works; with CUDA graphs it does not."""
    link_line: str = ""
    """A line with the source of the link, if it differs from that of the device."""

    @property
    def title(self) -> str:
        """One line with the model, its ranks and the device."""
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


def find_uncertainty(subject: Subject) -> float:
    """Return the relative uncertainty of a predicted step."""
    if subject.hardware is None:
        return PROFILE_UNCERTAINTY
    return DENSE_UNCERTAINTY if subject.model.experts is None else EXPERTS_UNCERTAINTY


def build_decision_table(report: PlanReport) -> Table:
    """Return a row for each tag, kind of layer and action that offloads or recomputes: bytes, cost and reason."""
    table = Table(
        title="What the plan does",
        caption="frees, offloads, recompute: per microbatch and layer; copies: per step, all ranks; "
        "costs: added to a step of the rank that needs it most, by itself; negative: other copies wait less, which saves time",
    )
    for heading in ("layers of kind", "tag or unit", "action"):
        table.add_column(heading)
    for heading in ("layers", "frees", "offloads", "recompute", "copies hidden", "exposed", "costs"):
        table.add_column(heading, justify="right")
    table.add_column("why")
    solution = report.solution
    moved = _sum_copies(solution.result.ranks)
    groups: dict[tuple[str, str, Action], list[Decision]] = {}
    for decision in solution.decisions:
        # A tag that moves and recomputes nothing by itself only accompanies another one.
        if decision.action is not Action.KEEP and (decision.freed_bytes or decision.moved_bytes or decision.recompute_s):
            groups.setdefault((decision.kind, decision.tag, decision.action), []).append(decision)
    prices = price_decisions(report.ranks, solution.plan, solution.result, groups.values(), budget_bytes=solution.budget_bytes)
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
            "another choice of the plan needs it" if price is None else price.describe(),
        )
    return table


def build_kept_table(report: PlanReport) -> Table:
    """Return the kept tags and units with the reason: those with the same kind of layer, count and reason share a row."""
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
        table.add_row(kind, ", ".join(tags), str(count), reason)
    return table


def build_peak_table(report: PlanReport) -> Table:
    """Return peak by pipeline rank, and the step time, for the plan and the baselines."""
    results = {name: report.baselines[name] for name in COMPARED if name in report.baselines} | {PLAN: report.solution.result}
    table = Table(title="Peak by pipeline rank")
    for heading in ("rank", "layers", "static", *results):
        table.add_column(heading, justify="right")
    table.add_column("where the plan peaks")
    for place, rank in enumerate(report.ranks):
        planned = report.solution.result.ranks[place]
        table.add_row(
            str(rank.rank),
            str(sum(len(chunk.layers) for chunk in rank.chunks)),
            format_bytes(planned.static_bytes),
            *(format_bytes(result.ranks[place].peak_bytes) for result in results.values()),
            planned.peak_at,
            end_section=place == len(report.ranks) - 1,
        )
    table.add_row("step", "", "", *(format_ms(result.step_s) for result in results.values()), "")
    return table


def build_rank_table(report: PlanReport) -> Table:
    """Return a row for each pipeline rank, with the parts of its step time under the plan."""
    table = Table(title="This plan by pipeline rank")
    headings = ("rank", "step", "compute", "slowed by copies", "waits for copies", "launch-bound", "for neighbours", "host")
    for heading in headings:
        table.add_column(heading, justify="right")
    for rank, result in zip(report.ranks, report.solution.result.ranks, strict=True):
        table.add_row(
            str(rank.rank),
            format_ms(result.step_s),
            format_ms(result.compute_s),
            format_ms(result.slowed_s),
            format_ms(result.waits.copies_s),
            format_ms(result.waits.late_s),
            format_ms(result.waits.neighbours_s),
            format_bytes(result.host_peak_bytes) if result.host_peak_bytes else "-",
        )
    return table


def build_sweep_table(baselines: Mapping[str, StepResult], solutions: Sequence[Solution], subject: Subject) -> Table:
    """Return a row for each baseline, then one for each budget from the largest to the smallest."""
    caption = f"predicted, for the worst rank\n~ is within {OVERHEAD_NOISE:.0%} of the baseline: noise"
    table = Table(title=subject.title, caption=caption, title_justify="left")
    table.add_column("")
    for heading in (
        "budget",
        "peak",
        f"step ±{find_uncertainty(subject):.0%}",
        "over baseline",
        "offloads a step",
        "recompute",
        "waits for copies",
    ):
        table.add_column(heading, justify="right")
    baseline_s = baselines["baseline"].step_s
    for name, result in baselines.items():
        table.add_row(name, "", *_list_sweep_cells(result, baseline_s), end_section=name == list(baselines)[-1])
    for solution in solutions:
        table.add_row("plan", format_bytes(solution.budget_bytes), *_list_sweep_cells(solution.result, baseline_s))
    return table


def _format_range(numbers: Iterable[float], write: Callable[[float], str]) -> str:
    """Return one formatted number, or a range if layers of one kind differ."""
    found = sorted(numbers)
    ends = dict.fromkeys((write(found[0]), write(found[-1])))
    return " to ".join(ends) if any(found) else "-"


def format_overhead(ratio: float) -> str:
    """Return a step time as a ratio to the baseline's; ~ marks a ratio within noise of 1."""
    return f"{'~' if 0 < abs(ratio - 1) < OVERHEAD_NOISE else ''}{ratio:.3f}"


def _format_cost(seconds: float) -> str:
    text = format_ms(seconds)
    return f"+{text}" if seconds > 0 and text != format_ms(0) else text.replace("-0.0 ", "0.0 ")


def find_costs(result: StepResult) -> tuple[int, float, float]:
    """Return bytes offloaded, seconds of recompute and seconds of waiting for copies in a step, each the maximum over ranks."""
    return (
        max(rank.d2h_bytes for rank in result.ranks),
        max(rank.recompute_s for rank in result.ranks),
        max(rank.waits.copies_s for rank in result.ranks),
    )


def _list_sweep_cells(result: StepResult, baseline_s: float) -> tuple[str, ...]:
    moved_bytes, recompute_s, waits_s = find_costs(result)
    return (
        format_bytes(result.peak_bytes),
        format_ms(result.step_s),
        format_overhead(result.step_s / baseline_s),
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
