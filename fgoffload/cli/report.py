"""Builds the table and the plot of `fgoffload train`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fgoffload.cli.comparison import RunRecord
from fgoffload.cli.console import make_table
from fgoffload.cli.plan_pictures import draw_axes, save_plot
from fgoffload.trainer.steps import Difference
from fgoffload.units import MIB, format_bytes, format_ms

WITHOUT, WITH = "without offload", "with offload"


def build_table(records: Mapping[str, RunRecord], differences: Mapping[str, Difference], title: str) -> Table:
    """Return a table with a column for each of `records`, which are keyed by label.

    `differences` maps `losses` and `gradients` to their first difference, if they differ.
    """
    table = _start_table(records, title)

    def add(name: str, show: Callable[[RunRecord], str], *, ends_section: bool = False) -> None:
        table.add_row(name, *map(show, records.values()), end_section=ends_section)

    add("loss, step 1", lambda record: f"{record.steps[0].loss:.6f}")
    add(f"loss, step {len(records[WITHOUT].steps)}", lambda record: f"{record.steps[-1].loss:.6f}")
    if WITH in records:
        for name in ("losses", "gradients"):
            answer = Text("yes", style="bold green")
            if name in differences:
                answer = Text(f"no, from step {differences[name].step}", style="bold red")
            table.add_row(f"{name} bitwise identical", "", answer, end_section=name == "gradients")
    add("activations at peak", lambda record: format_bytes(record.activation_peak_bytes))
    if WITH in records:
        before, after = (records[label].activation_peak_bytes for label in (WITHOUT, WITH))
        saved = f"{1 - after / before if before else 0.0:.1%}"
        if saved.strip("-") != "0.0%":
            table.add_row("  reduced by", "", Text(saved, style="bold green"))
        if place := records[WITH].activation_peak_place:
            table.add_row("  peak reached at", "", place)
    if all(record.allocator_peak_bytes is not None for record in records.values()):
        add("allocated at peak", lambda record: format_bytes(record.allocator_peak_bytes or 0))
    add("step time", _step_time, ends_section=True)
    if WITH in records:
        _add_offload_rows(table, records[WITH])
    return table


def write_memory_plot(path: Path, records: Mapping[str, RunRecord], title: str) -> None:
    """Plot the activation bytes of each run over one step."""
    x_label = "position in the step, counted in saved and unpacked tensors [%]"
    axes = draw_axes(4.5, f"Activation memory over one step\n{title}", x=x_label, y="activations on the device [MiB]")
    for (label, record), color in zip(records.items(), ("#8a8f98", "#1f77b4"), strict=False):
        x, y = _step_curve(record)
        peak = format_bytes(record.activation_peak_bytes)  # the same text as in the table
        axes.plot(x, y, drawstyle="steps-post", color=color, linewidth=1.6, label=f"{label}: peak {peak}")
        axes.fill_between(x, y, step="post", color=color, alpha=0.15, linewidth=0)
        axes.axhline(record.activation_peak_bytes / MIB, color=color, linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1.2 * max(record.activation_peak_bytes for record in records.values()) / MIB or 1)
    axes.legend(loc="upper left", ncols=len(records))
    save_plot(axes, path)


def _start_table(records: Mapping[str, RunRecord], title: str) -> Table:
    record = records[WITHOUT]
    timed, ranks = len(record.timed_steps), ""
    steps = "step 2" if timed == 1 else f"median of steps 2 to {timed + 1}"
    if record.ranks > 1:
        ranks = f"\n{record.ranks} ranks, all compared; memory and time: maximum; copied bytes: sum"
    times = f"; step time: {steps}" if timed else ""
    caption = f"activations: step {record.counted_step}; copied bytes: step {len(record.steps)}{times}{ranks}"
    return make_table(
        left=("",), right=list(records), title=title, caption=caption, title_justify="left", caption_justify="left"
    )


def _step_time(record: RunRecord) -> str:
    seconds = record.find_step_seconds()
    return "needs 3 steps" if seconds is None else format_ms(seconds)


def _add_offload_rows(table: Table, record: RunRecord) -> None:
    """Add rows for copied bytes, for bytes that stayed on the GPU and why, for host memory, and for waits."""
    if (stats := record.stats) is None:
        return
    kept: Counter[str] = Counter()
    for name, tag in stats.tags.items():
        table.add_row(f"{name}, to host / back", "", f"{format_bytes(tag.d2h_bytes)} / {format_bytes(tag.h2d_bytes)}")
        kept.update(tag.kept_bytes)
    for reason, kept_bytes in kept.items():
        if kept_bytes:
            table.add_row(f"kept: {reason}", "", format_bytes(kept_bytes))
    table.add_row("host memory at peak", "", format_bytes(stats.host_peak_bytes))
    table.add_row("prefetch misses / window waits", "", f"{stats.prefetch_misses} / {stats.window_waits}")


def _step_curve(record: RunRecord) -> tuple[Sequence[float], Sequence[float]]:
    """Return the memory curve: positions in the step in percent, and activation memory at each position in MiB."""
    if not record.samples:
        return [0.0, 100.0], [0.0, 0.0]
    last = record.samples[-1].position or 1
    return [100 * sample.position / last for sample in record.samples], [s.resident_bytes / MIB for s in record.samples]
