"""Summarizes a plan in 80 columns: whether it fits, its cost, and the flags to train with it."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fgoffload.cli.console import make_table
from fgoffload.cli.plan_tables import OVERHEAD_NOISE, PLAN, Subject, find_costs, find_uncertainty, format_overhead, list_notes
from fgoffload.plan import Action
from fgoffload.planner.entry import PlanReport
from fgoffload.planner.model_ranks import count_host_bytes_per_node
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.solving.megatron_flags import choose_usual_modules
from fgoffload.planner.solving.solver import Solution
from fgoffload.units import format_bytes

WIDTH = 80

_ACTIONS = {
    Action.OFFLOAD: "offload",
    Action.RECOMPUTE: "recompute",
    Action.RECOMPUTE_AND_OFFLOAD: "recompute, with the input offloaded",
}


def build_summary_table(report: PlanReport, subject: Subject) -> Table:
    """Return a table of the baselines and the plan: peak, step time, overhead, and whether each fits the budget."""
    headings = ("peak", f"step ±{find_uncertainty(subject):.0%}", "over baseline", "fits")
    table = make_table(left=("",), right=headings, width=WIDTH)
    baseline_s = report.baselines["baseline"].step_s
    for name, result in {**report.baselines, PLAN: report.solution.result}.items():
        fits = result.peak_bytes <= report.solution.budget_bytes
        table.add_row(
            Text(name, style="bold" if name == PLAN else ""),
            format_bytes(result.peak_bytes),
            format_step(result.step_s),
            format_overhead(result.step_s / baseline_s),
            Text("yes", style="green") if fits else Text("no", style="red"),
            end_section=name == list(report.baselines)[-1],
        )
    return table


def format_step(seconds: float) -> str:
    """Return a step time, rounded to about three digits: `545 ms`, `50.6 s`."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def describe_notes(report: PlanReport, subject: Subject) -> str:
    """Return notes on overheads within noise, the modules of selective recompute, and pinned host memory."""
    results = (*report.baselines.values(), report.solution.result)
    lines = list_notes(results, report.baselines["baseline"].step_s)
    usual = " ".join(choose_usual_modules(report.ranks))
    if usual:
        lines.append(f"Selective recompute is --recompute-modules {usual}.")
        if report.baselines["selective recompute"].peak_bytes > report.baselines["baseline"].peak_bytes:
            lines.append("It keeps more for backward than fused attention does, so its peak is higher.")
    host_bytes = [rank.host_peak_bytes for rank in report.solution.result.ranks]
    if max(host_bytes):
        node = ""
        if subject.hardware is not None:
            world_size = subject.parallelism.world_size
            node_bytes = count_host_bytes_per_node(host_bytes, hardware=subject.hardware, world_size=world_size)
            node = f" per rank, {format_bytes(node_bytes)} per node"
        lines.append(f"Pinned host memory: {format_bytes(max(host_bytes))}{node}.")
    return "\n".join(lines)


def describe_treatments(solution: Solution) -> str:
    """Return a line for each action with its tags. Tags that it affects in only some layers show the number of layers."""
    chosen: dict[Action, dict[str, set[int]]] = {}
    able: dict[str, set[int]] = {}
    for decision in solution.decisions:
        able.setdefault(decision.tag, set()).update(decision.layers)
        if decision.action is not Action.KEEP:
            chosen.setdefault(decision.action, {}).setdefault(decision.tag, set()).update(decision.layers)
    lines = []
    for action, words in _ACTIONS.items():
        tags = [
            tag if layers == able[tag] else f"{tag} ({len(layers)} of {len(able[tag])} layers)"
            for tag, layers in chosen.get(action, {}).items()
        ]
        if tags:
            lines.append(f"{words.capitalize()}: {', '.join(tags)}.")
    return "\n".join(lines)


def describe_use(solution: Solution, path: Path | None) -> str:
    """Return the flags for training with the plan and with Megatron's own best settings, the recommended ones first."""
    if not solution.plan.actions:
        return "Everything is kept on the GPU: the run fits the budget without a plan."
    own = "this plan. Write it with --json plan.json."
    if path is not None:
        own = f"this plan:\n{fold_flags(('--fine-grained-activation-offloading', '--offload-plan', str(path)))}"
    start = "To train, use `fgoffload run`, and remove the script's own recompute flags."
    nearest = solution.nearest
    if nearest is None:
        return f"{start}\nUse {own}\nNo combination of Megatron's own flags fits the budget."
    slower, peak = nearest.result.step_s / solution.result.step_s - 1, format_bytes(nearest.result.peak_bytes)
    mark = "~" if slower < OVERHEAD_NOISE else ""
    cost = f"{'as fast as' if slower < 0.0005 else f'{mark}{slower:.1%} slower than'} the plan, peak {peak}"
    flags = f"Megatron's own flags, {cost}:\n{fold_flags(nearest.flags.list_arguments() or ('(none)',))}"
    first, second = (flags, own) if slower < OVERHEAD_NOISE else (own, flags)
    return f"{start}\nRecommended: {first}\nOr {second}"


def fold_flags(words: Sequence[str]) -> str:
    """Wrap flags into lines of at most 80 columns that can be pasted into a shell."""
    lines = textwrap.wrap(" ".join(words), width=WIDTH - 7, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(" \\\n".join(lines), "    ")


def list_prediction(report: PlanReport, subject: Subject) -> dict[str, Any]:
    """Return the predictions for the plan file, in bytes and seconds."""
    nearest = report.solution.nearest
    return {
        **_list_subject(subject),
        "budget_bytes": report.solution.budget_bytes,
        "settings": {name: _list_result(result) for name, result in {**report.baselines, PLAN: report.solution.result}.items()},
        "megatron_flags": None
        if nearest is None
        else {"flags": nearest.flags.list_arguments(), **_list_result(nearest.result)},
        "ranks": [
            {name: getattr(rank, name) for name in ("rank", "peak_bytes", "static_bytes", "step_s")}
            | {"host_bytes": rank.host_peak_bytes}
            for rank in report.solution.result.ranks
        ],
        "decisions": [{**dataclasses.asdict(one), "action": one.action.value} for one in report.solution.decisions],
    }


def list_sweep(baselines: Mapping[str, StepResult], solutions: list[Solution], subject: Subject) -> dict[str, Any]:
    """Return the predictions of a sweep, in bytes and seconds."""
    return {
        **_list_subject(subject),
        "baselines": {name: _list_result(result) for name, result in baselines.items()},
        "plans": [{"budget_bytes": one.budget_bytes, **_list_result(one.result)} for one in solutions],
    }


def _list_subject(subject: Subject) -> dict[str, Any]:
    return {
        "run": subject.title,
        "reserve_bytes": subject.reserve_bytes,
        "host_budget": subject.host_budget,
        "step_uncertainty": find_uncertainty(subject),
    }


def _list_result(result: StepResult) -> dict[str, Any]:
    offloaded_bytes, recompute_s, copy_waits_s = find_costs(result)
    return {
        "step_s": result.step_s,
        "peak_bytes": result.peak_bytes,
        "peak_rank": result.worst_rank.rank,
        "offloaded_bytes": offloaded_bytes,
        "recompute_s": recompute_s,
        "copy_waits_s": copy_waits_s,
        "host_bytes": max(rank.host_peak_bytes for rank in result.ranks),
    }
