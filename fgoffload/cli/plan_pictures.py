"""Pictures of plans: memory over a step, and the frontier of memory against step time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fgoffload.errors import ConfigError
from fgoffload.output_files import replacing
from fgoffload.planner.simulation.simulation_result import StepResult
from fgoffload.planner.solving.solver import Solution
from fgoffload.units import GIB

_COLORS = ("#8a8f98", "#1f77b4")
_MARKERS: Mapping[str, str] = {
    "baseline": "*",
    "full recompute": "s",
    "selective recompute": "D",
    "offload everything": "v",
}


def check_picture(path: Path) -> None:
    """Refuse an unsupported image format before the work starts.

    Raises:
        ConfigError: With the supported formats.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    # Without a suffix matplotlib writes a PNG, and adds the suffix.
    if path.suffix and path.suffix[1:].lower() not in known:
        raise ConfigError(f"--plot {path} has an unsupported image format. Give one of {', '.join(known)}, as in plan.png.")


def write_memory_picture(path: Path, results: Mapping[str, StepResult], *, budget_bytes: int, title: str) -> None:
    """Write the device memory of the worst rank over a step.

    Args:
        path: Output file; its suffix is the format.
        results: Results by name, simulated with `Detail.TIMELINE`. The last one chooses the rank.
        budget_bytes: Drawn as a dashed line.
        title: Title of the picture.

    Raises:
        ConfigError: The file cannot be written.
    """
    # Imported here, since it takes as long as a plan. pyplot would need a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4), layout="constrained")
    axes = figure.subplots()
    number = list(results.values())[-1].worst_rank.rank
    for (name, result), color in zip(results.items(), _COLORS, strict=False):
        rank = result.ranks[number]
        samples = () if rank.timeline is None else rank.timeline.memory
        seconds = [sample.at_s * 1e3 for sample in samples]
        gib = [sample.device_bytes / GIB for sample in samples]
        label = f"{name}: {rank.peak_bytes / GIB:.1f} GiB, {result.step_s * 1e3:.0f} ms"
        axes.step(seconds, gib, where="post", label=label, color=color, linewidth=1.2)
    axes.axhline(budget_bytes / GIB, color="#d62728", linestyle="--", linewidth=1, label="budget")
    axes.set_xlabel("ms of the step, predicted")
    axes.set_ylabel(f"GiB on pipeline rank {number}")
    axes.set_title(title, fontsize=8)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    _save(figure, path)


def write_sweep_picture(path: Path, baselines: Mapping[str, StepResult], solutions: Sequence[Solution], *, title: str) -> None:
    """Write the frontier: step time over the baseline's against peak memory.

    Args:
        path: Output file; its suffix is the format.
        baselines: Results by name, drawn as points.
        solutions: Plans, drawn as a line.
        title: Title of the picture.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    axes = figure.subplots()
    baseline_s = baselines["baseline"].step_s
    results = [solution.result for solution in solutions]
    axes.plot(
        [result.peak_bytes / GIB for result in results],
        [result.step_s / baseline_s for result in results],
        marker="o",
        markersize=4,
        color="#1f77b4",
        label="fgoffload: planned",
    )
    for name, result in baselines.items():
        point = (result.peak_bytes / GIB, result.step_s / baseline_s)
        axes.plot(*point, linestyle="none", marker=_MARKERS.get(name, "x"), markersize=8, label=name)
    axes.set_xlabel("peak memory of the fullest rank, GiB, predicted")
    axes.set_ylabel("step time over baseline")
    axes.set_title(title, fontsize=8)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: "object", path: Path) -> None:
    try:
        # matplotlib adds a suffix if there is none.
        with replacing(path if path.suffix else path.with_suffix(".png")) as partial:
            figure.savefig(partial, dpi=120)  # type: ignore[attr-defined]
    except (OSError, ValueError) as error:
        # matplotlib raises ValueError for an unsupported suffix.
        raise ConfigError(f"--plot {path} cannot be written: {error}. Give another file, as in plan.png.") from error
