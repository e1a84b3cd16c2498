"""Plots memory over a step, and step time against memory."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.output_files import replacing
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.solving.solver import Solution
from fgoffload.units import GIB

MOST_OVERHEAD = 1.5
"""Upper limit of the y axis in the plot of a sweep: step time relative to the baseline."""
MOST_DRAWN_SPANS = 4000
"""Maximum number of ops and copies on a rank for which a plot shows the whole step."""

_COLORS = ("#8a8f98", "#1f77b4")
_MARKERS: Mapping[str, str] = {"baseline": "*", "full recompute": "s", "selective recompute": "D", "offload everything": "v"}


def write_memory_picture(path: Path, results: Mapping[str, StepResult], *, rank: int, budget_bytes: int, title: str) -> None:
    """Plot the device memory of a pipeline rank over a step. If the step has many ops, the plot ends soon after the peak.

    `results` must be simulated with `Detail.TIMELINE`, and the last one must be the plan's. A dashed line shows the budget.
    """
    axes = draw_axes(4, title, x="predicted time in the step, ms", y=f"memory of rank {rank} (highest peak in the plan), GiB")
    end_s = max(_find_shown_end(result, rank) for result in results.values())
    for (name, result), color in zip(results.items(), _COLORS, strict=False):
        found = result.ranks[rank]
        samples = () if found.timeline is None else found.timeline.memory
        worst = result.worst_rank
        other = f" on rank {worst.rank}, {found.peak_bytes / GIB:.1f} GiB here" if worst.peak_bytes > found.peak_bytes else ""
        label = f"{name}: {worst.peak_bytes / GIB:.1f} GiB{other}, step {result.step_s * 1e3:.0f} ms"
        shown = [(sample.at_s * 1e3, sample.device_bytes / GIB) for sample in samples if sample.at_s <= end_s]
        axes.step(*zip(*shown, strict=True), where="post", label=label, color=color, linewidth=1)
    static_gib = list(results.values())[-1].ranks[rank].static_bytes / GIB
    axes.axhspan(0, static_gib, color="#8a8f98", alpha=0.25, label=f"static: {static_gib:.1f} GiB")
    axes.axhline(
        budget_bytes / GIB, color="#d62728", linestyle="--", linewidth=1, label=f"budget: {budget_bytes / GIB:.1f} GiB"
    )
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, end_s * 1e3)
    axes.legend(fontsize=8, loc="lower right")
    save_plot(axes, path)


def _find_shown_end(result: StepResult, rank: int) -> float:
    """Return the time at which the plot ends: the end of the step, or soon after the peak if the step has many ops."""
    timeline = result.ranks[rank].timeline
    if timeline is None or len(timeline.spans) <= MOST_DRAWN_SPANS:
        return result.step_s
    peak_s = max(timeline.memory, key=lambda sample: sample.device_bytes).at_s
    return min(result.step_s, 1.5 * peak_s)


def write_sweep_picture(path: Path, baselines: Mapping[str, StepResult], solutions: Sequence[Solution], *, title: str) -> None:
    """Plot step time, relative to the baseline, against peak memory for plans and for Megatron's own flags.

    Plans form a line, and baselines are points. The legend shows the values of baselines outside the plot.
    """
    axes = draw_axes(4.5, title, x="predicted peak memory (maximum over ranks), GiB", y="step time over baseline")
    baseline_s = baselines["baseline"].step_s

    def locate(results: Iterable[StepResult]) -> tuple[list[float], list[float]]:
        found = list(results)
        return [result.peak_bytes / GIB for result in found], [result.step_s / baseline_s for result in found]

    planned = locate(solution.result for solution in solutions)
    axes.plot(*planned, marker="o", markersize=4, color="#1f77b4", label="fgoffload: planned")
    flags = locate(solution.nearest.result for solution in solutions if solution.nearest is not None)
    axes.plot(*flags, linestyle="none", marker="x", color="#ff7f0e", label="Megatron's best flags")
    for name, result in baselines.items():
        ratio = result.step_s / baseline_s
        label = name if ratio <= MOST_OVERHEAD else f"{name}: {ratio:.2f} at {result.peak_bytes / GIB:.1f} GiB"
        axes.plot(result.peak_bytes / GIB, ratio, linestyle="none", marker=_MARKERS.get(name, "x"), markersize=8, label=label)
    axes.set_ylim(top=MOST_OVERHEAD)
    axes.legend(fontsize=8)
    save_plot(axes, path)


def draw_axes(height: float, title: str, *, x: str, y: str) -> Any:
    """Return the empty axes of a new plot. `height` is in inches; `x` and `y` are the axis labels."""
    # Imported here, since the import takes as long as planning. Unlike pyplot, Figure keeps no global state.
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8.5, height), layout="constrained").subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=8)
    axes.grid(alpha=0.3)
    return axes


def save_plot(axes: Any, path: Path) -> None:
    """Write the plot of `axes` to `path`, whose suffix selects the image format."""
    try:
        with replacing(path) as partial:
            axes.figure.savefig(partial, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}. Use another file.") from error
