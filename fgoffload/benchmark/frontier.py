"""Finds the Pareto frontier of memory against step time, and draws it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fgoffload.benchmark.measurement import Summary
from fgoffload.benchmark.settings import BASELINE, System
from fgoffload.output_files import replacing
from fgoffload.units import GIB, MIB

LINES: Mapping[System, tuple[str, str, str]] = {
    System.BASELINE: ("baseline", "#444444", "*"),
    System.RECOMPUTE: ("Megatron-Core: recompute", "#8a8f98", "s"),
    System.MEGATRON: ("Megatron-Core: its own offload", "#d62728", "v"),
    System.LAYERS: ("Transformer Engine: whole layers", "#9467bd", "D"),
    System.SAVE_ON_CPU: ("PyTorch: save_on_cpu", "#8c564b", "P"),
    System.OURS: ("fgoffload: modules", "#2ca02c", "o"),
    System.PLAN: ("fgoffload: plans", "#1f77b4", "o"),
    System.BUDGET: ("fgoffload: planner", "#17becf", "o"),
}
"""Label, color and marker of each system in the picture."""


MOST_RATIO = 1.5
"""Largest step time in the picture, relative to the baseline. Full recompute is below it. The caption names slower settings."""


class Point(NamedTuple):
    """Memory and step time of one setting."""

    peak_bytes: float
    ratio: float
    """Step time relative to `baseline`."""


def find_frontier(points: Iterable[Point]) -> list[Point]:
    """Return the Pareto-optimal points, from the most memory to the least."""
    frontier: list[Point] = []
    # In order of time, then memory, a point is on the frontier if it takes less memory than all faster ones.
    for point in sorted(points, key=lambda point: (point.ratio, point.peak_bytes)):
        if not frontier or point.peak_bytes < frontier[-1].peak_bytes:
            frontier.append(point)
    return frontier


def list_points(summaries: Sequence[Summary], system: System) -> list[Point]:
    """Return the points of a system; `baseline` has one for each kind of process."""
    own = [one for one in summaries if one.setting.system is system]
    return [Point(one.peak_bytes, one.ratio) for one in own if one.ratio is not None and one.peak_bytes is not None]


def write_frontier_plot(path: Path, summaries: Sequence[Summary], *, title: str) -> None:
    """Write a picture of peak memory against step time, with a line through the frontier of each system."""
    # Imported here, since the import takes as long as a short training. pyplot would need a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.add_subplot()
    is_allocated = any(one.worst is not None and one.worst.peak_allocated_bytes is not None for one in summaries)
    # Models that train without a GPU have a peak of a few MiB.
    most = max((one.peak_bytes for one in summaries if one.peak_bytes is not None), default=0)
    scale, unit = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    baseline = list_points(summaries, System.BASELINE)[:1]
    beyond = []
    for system, (label, color, marker) in LINES.items():
        points = list_points(summaries, system)
        shown = [point for point in points if point.ratio <= MOST_RATIO]
        beyond += [f"{label} {one.ratio:.1f} at {one.peak_bytes / scale:.1f} {unit}" for one in points if one not in shown]
        if not shown:
            continue
        axes.scatter(*_locate(shown, scale), color=color, marker=marker, label=label)
        if system is not System.BASELINE:  # each system can also run the baseline
            axes.plot(*_locate(find_frontier([*baseline, *shown]), scale), linewidth=1.2, color=color)
    axes.axhline(1.0, color="#cccccc", linewidth=0.8, zorder=0)
    caption = f"\nbeyond {MOST_RATIO}: {'; '.join(beyond)}" if beyond else ""
    if beyond:
        axes.set_ylim(top=MOST_RATIO)
    axes.set_xlabel(f"{'peak allocated' if is_allocated else 'activations at peak'} [{unit}]{caption}")
    axes.set_ylabel(f"step time over {BASELINE.name}")
    axes.set_title(title, fontsize=11, pad=14)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=150)


def _locate(points: Sequence[Point], scale: int) -> tuple[list[float], list[float]]:
    return [point.peak_bytes / scale for point in points], [point.ratio for point in points]
