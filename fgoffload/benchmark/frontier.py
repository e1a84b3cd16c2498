"""Finds and plots the Pareto frontier of memory and step time."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fgoffload.benchmark.measurement import Summary
from fgoffload.benchmark.settings import BASELINE, System
from fgoffload.output_files import replacing
from fgoffload.units import GIB, MIB

LINES = {
    System.BASELINE: ("baseline", "#444444", "*"),
    System.RECOMPUTE: ("Megatron-Core: recompute", "#8a8f98", "s"),
    System.MEGATRON: ("Megatron-Core: its own offload", "#d62728", "v"),
    System.LAYERS: ("Transformer Engine: whole layers", "#9467bd", "D"),
    System.SAVE_ON_CPU: ("PyTorch: save_on_cpu", "#8c564b", "P"),
    System.OURS: ("fgoffload: modules", "#2ca02c", "o"),
    System.PLAN: ("fgoffload: plans", "#1f77b4", "o"),
    System.BUDGET: ("fgoffload: planner", "#17becf", "o"),
}
"""Label, color and marker of each system in the plot."""

MAX_RATIO = 1.5
"""Maximum step time in the plot, relative to the baseline. Full recompute stays below this limit."""


class Point(NamedTuple):
    """Memory and step time of one setting."""

    peak_bytes: float
    ratio: float
    """Step time relative to `baseline`."""


def find_frontier(points: Iterable[Point]) -> list[Point]:
    """Return the Pareto-optimal points in order of increasing step time."""
    frontier: list[Point] = []
    for point in sorted(points, key=lambda point: (point.ratio, point.peak_bytes)):
        if not frontier or point.peak_bytes < frontier[-1].peak_bytes:
            frontier.append(point)
    return frontier


def write_frontier_plot(path: Path, summaries: Sequence[Summary], *, title: str) -> None:
    """Plot step time against peak memory, with a line along each system's frontier."""
    # Imported here because the import is slow. Unlike pyplot, Figure keeps no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.add_subplot()
    is_allocated = any(one.worst is not None and one.worst.peak_allocated_bytes is not None for one in summaries)
    points: dict[System, list[Point]] = {system: [] for system in LINES}
    for one in summaries:
        if one.ratio is not None and one.peak_bytes is not None:
            points[one.setting.system].append(Point(one.peak_bytes, one.ratio))
    # Models that are small enough for a CPU have peaks of only a few MiB.
    most = max((point.peak_bytes for own in points.values() for point in own), default=0)
    scale, unit = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    for system, (label, color, marker) in LINES.items():
        shown = [point for point in points[system] if point.ratio <= MAX_RATIO]
        if not shown:
            continue
        axes.scatter(*_locate(shown, scale), color=color, marker=marker, label=label)
        if system is not System.BASELINE:  # each line includes the baseline
            axes.plot(*_locate(find_frontier([*points[System.BASELINE][:1], *shown]), scale), linewidth=1.2, color=color)
    axes.axhline(1.0, color="#cccccc", linewidth=0.8, zorder=0)
    axes.set_xlabel(f"{'peak allocated memory' if is_allocated else 'peak activation memory'} [{unit}]")
    axes.set_ylabel(f"step time over {BASELINE.name} (up to {MAX_RATIO})")
    axes.set_title(title, fontsize=11, pad=14)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=150)


def _locate(points: Sequence[Point], scale: int) -> tuple[list[float], list[float]]:
    return [point.peak_bytes / scale for point in points], [point.ratio for point in points]
