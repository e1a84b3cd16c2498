"""Builds the tables of `fgoffload plan`."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.table import Table

from fgoffload.cli.console import make_table
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
"""Label of the plan in tables and plots."""
COMPARED = ("baseline", "full recompute", "selective recompute")
"""Baselines shown in the table of peaks by pipeline rank."""

PROFILE_UNCERTAINTY, DENSE_UNCERTAINTY, EXPERTS_UNCERTAINTY = 0.04, 0.15, 0.25
"""Relative uncertainty of step times predicted from a profile, or from the hardware table for a dense or an MoE model. About
four out of five predictions are within this margin. Source: docs/results/predictions.md and its published steps."""
OVERHEAD_NOISE = 0.02
"""If two predicted step times differ by less than this fraction, the difference is noise. The fraction is below the uncertainty
of each step time, since two predictions for the same model share most of their error."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Description of the planned run, for titles and captions."""

    model: ModelShape
    parallelism: Parallelism
    hardware: Hardware | None
    """Properties of the device. None when planning from a profile of a training run."""
    device: str
    reserve_bytes: int
    """Memory that each device uses outside PyTorch's allocator. It counts as static memory."""
    host_budget: str
    """The host budget of a rank and where it comes from, as text."""
    takes_auto: bool = True
    """Whether `--offload-modules auto` works. It does not work with CUDA graphs."""
    link_line: str = ""
    """Description of the link if the profile contains only link measurements, otherwise empty."""

    @property
    def title(self) -> str:
        """The model, its parallel sizes, the device and the microbatches, on one line."""
        sizes = self.parallelism
        parts = {"tp": sizes.tensor_parallel_size, "pp": sizes.pipeline_parallel_size, "vp": sizes.chunks}
        parts |= {"cp": sizes.context_parallel_size, "ep": sizes.expert_parallel_size, "dp": sizes.data_parallel_size}
        shown = " ".join(f"{name} {size}" for name, size in parts.items() if size > 1 or name in ("tp", "pp"))
        count = sizes.microbatches
        return (
            f"{self.model.name}: {self.model.num_layers} layers, {shown}, {sizes.world_size} x {self.device}; "
            f"{count} microbatch{'es' if count > 1 else ''} of {sizes.micro_batch_size} x {self.model.seq_length}"
        )


def find_uncertainty(subject: Subject) -> float:
    """Return the relative uncertainty of a predicted step time."""
    if subject.hardware is None:
        return PROFILE_UNCERTAINTY
    return DENSE_UNCERTAINTY if subject.model.experts is None else EXPERTS_UNCERTAINTY


def build_decision_table(report: PlanReport) -> Table:
    """Return a table of the plan's actions. Each row combines a kind of layer, a tag and an action."""
    table = make_table(
        left=("kind of layer", "tag or unit", "action"),
        right=("layers", "frees", "offloads", "recompute", "hidden copies", "exposed copies", "cost"),
        last=("reason",),
        title="Actions of the plan",
        caption="frees, offloads and recompute: per microbatch and layer; copies: per step, sum over all ranks; cost: step "
        "time added on the rank that would have the highest peak without the row, negative if the row shortens waits; tags "
        "that only share another tag's storage have no row",
    )
    solution = report.solution
    moved = _sum_copies(solution.result.ranks)
    groups: dict[tuple[str, str, Action], list[Decision]] = {}
    for decision in solution.decisions:
        # Skip a tag that only shares another tag's storage: its action frees, copies and recomputes nothing.
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
            *(map(format_ms, copies) if copies else "--"),
            "?" if price is None else _format_cost(price.cost_s),
            "required by another action of the plan" if price is None else price.describe(),
        )
    return table


def build_kept_table(report: PlanReport) -> Table:
    """Return a table of the kept tags and units. Those with the same kind of layer, number of layers and reason share a row."""
    headings = ("kind of layer", "tags and units")
    table = make_table(left=headings, right=("layers",), last=("reason",), title="Kept on the GPU")
    counts: Counter[tuple[str, str, str]] = Counter()
    for decision in report.solution.decisions:
        if decision.action is Action.KEEP:
            counts[decision.kind, decision.reason, decision.tag] += len(decision.layers)
    rows: dict[tuple[str, str, int], list[str]] = {}
    for (kind, reason, tag), count in counts.items():
        rows.setdefault((kind, reason, count), []).append(tag)
    for (kind, reason, count), tags in rows.items():
        table.add_row(kind, ", ".join(tags), str(count), reason)
    return table


def build_peak_table(report: PlanReport, subject: Subject) -> Table:
    """Return a table of peak memory on each pipeline rank, under the plan and the baselines. The last row shows step time."""
    results = {name: report.baselines[name] for name in COMPARED if name in report.baselines} | {PLAN: report.solution.result}
    headings = ("rank", "layers", "static", *results)
    table = make_table(right=headings, last=("plan's peak reached at",), title="Peak by pipeline rank")
    for place, rank in enumerate(report.ranks):
        planned = report.solution.result.ranks[place]
        peaks = (result.ranks[place].peak_bytes for result in results.values())
        layers = sum(len(chunk.layers) for chunk in rank.chunks)
        sizes = map(format_bytes, (planned.static_bytes, *peaks))
        table.add_row(str(rank.rank), str(layers), *sizes, planned.peak_at, end_section=place == len(report.ranks) - 1)
    step = f"step ±{find_uncertainty(subject):.0%}"
    table.add_row(step, "", "", *(format_ms(result.step_s) for result in results.values()), "")
    return table


def build_rank_table(report: PlanReport, subject: Subject) -> Table:
    """Return a table that breaks down each pipeline rank's step time under the plan."""
    wait_names = ("waits for copies", "waits for the CPU", "waits for other ranks")
    headings = ("rank", f"step ±{find_uncertainty(subject):.0%}", "compute", "slowed by copies", *wait_names, "host memory")
    table = make_table(right=headings, title="Step time by pipeline rank")
    for rank, result in zip(report.ranks, report.solution.result.ranks, strict=True):
        waits = result.waits
        times = (result.step_s, result.compute_s, result.slowed_s, waits.copies_s, waits.late_s, waits.neighbours_s)
        table.add_row(str(rank.rank), *map(format_ms, times), _format_or_dash(result.host_peak_bytes, format_bytes))
    return table


def build_sweep_table(baselines: Mapping[str, StepResult], solutions: Sequence[Solution], subject: Subject) -> Table:
    """Return a table with a row for each baseline, followed by a row for the plan of each solution."""
    step = f"step ±{find_uncertainty(subject):.0%}"
    baseline_s = baselines["baseline"].step_s
    results = (*baselines.values(), *(solution.result for solution in solutions))
    table = make_table(
        left=("",),
        right=("budget", "peak", step, "over baseline", "offloads per step", "recompute", "waits for copies"),
        title=subject.title,
        caption="\n".join(("predicted; maximum over ranks", *list_notes(results, baseline_s))),
        title_justify="left",
    )
    for name, result in baselines.items():
        table.add_row(name, "", *_list_sweep_cells(result, baseline_s), end_section=name == list(baselines)[-1])
    for solution in solutions:
        table.add_row("plan", format_bytes(solution.budget_bytes), *_list_sweep_cells(solution.result, baseline_s))
    return table


def _format_range(numbers: Iterable[float], write: Callable[[float], str]) -> str:
    """Format numbers as one number if all are equal, otherwise as a range. Return `-` if all are 0."""
    found = sorted(numbers)
    return " to ".join(dict.fromkeys((write(found[0]), write(found[-1])))) if any(found) else "-"


def _format_or_dash(value: float, write: Callable[[float], str]) -> str:
    return write(value) if value else "-"


def format_overhead(ratio: float) -> str:
    """Format the ratio of a step time to the baseline's. A leading `~` marks a difference that counts as noise."""
    return f"{'~' if 0 < abs(ratio - 1) < OVERHEAD_NOISE else ''}{ratio:.3f}"


def list_notes(results: Iterable[StepResult], baseline_s: float) -> list[str]:
    """Return the footnote that explains `~`, or an empty list if no result is marked with it."""
    is_marked = any(format_overhead(result.step_s / baseline_s).startswith("~") for result in results)
    return [f"~: differs from the baseline by less than {OVERHEAD_NOISE:.0%}, which is noise."] if is_marked else []


def _format_cost(seconds: float) -> str:
    text = format_ms(seconds)
    return f"+{text}" if seconds > 0 and text != format_ms(0) else text.replace("-0.0 ", "0.0 ")


def find_costs(result: StepResult) -> tuple[int, float, float]:
    """Return three maxima over ranks for a step: offloaded bytes, recompute seconds, and seconds spent waiting for copies."""
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
        _format_or_dash(moved_bytes, format_bytes),
        _format_or_dash(recompute_s, format_ms),
        _format_or_dash(waits_s, format_ms),
    )


def _sum_copies(ranks: Sequence[RankResult]) -> dict[tuple[str, str, Action], tuple[float, float]]:
    """Return hidden and exposed copy seconds, summed over all ranks and keyed by kind of layer, tag and action."""
    found: dict[tuple[str, str, Action], tuple[float, float]] = {}
    for one in (tag for rank in ranks for tag in rank.tags):
        hidden_s, exposed_s = found.get((one.kind, one.tag, one.action), (0.0, 0.0))
        found[one.kind, one.tag, one.action] = (hidden_s + one.hidden_s, exposed_s + one.exposed_s)
    return found
