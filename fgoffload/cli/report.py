"""Shows the measurements of trainings: one table, one plot."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fgoffload.benchmark.steps import Difference
from fgoffload.cli.comparison import Comparison, RunRecord
from fgoffload.config import OffloadConfig
from fgoffload.output_files import replacing
from fgoffload.units import MIB, format_bytes, format_ms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The training, for titles and captions."""

    arguments_file: str
    layers: int
    device: str
    versions: str
    """Package versions, as in `torch 2.13.0, megatron-core 0.16.1`."""
    offload: OffloadConfig | None

    @property
    def title(self) -> str:
        """One line with the model and its device."""
        return f"{self.arguments_file}: {self.layers} {'layer' if self.layers == 1 else 'layers'} on {self.device}"


def build_comparison_table(comparison: Comparison, setting: Setting) -> Table:
    """Return the table of a training without and with offload."""
    without, with_offload = comparison.without, comparison.with_offload
    table = _start_table(setting, "without offload", "with offload", record=without)
    for name, before, after in zip(*_loss_column(without), _loss_column(with_offload)[1], strict=True):
        table.add_row(name, before, after)
    table.add_row("losses bitwise identical", "", _yes_or_no(comparison.find_loss_difference()))
    table.add_row("gradients bitwise identical", "", _yes_or_no(comparison.find_gradient_difference()), end_section=True)
    table.add_row(
        "activations at peak", format_bytes(without.activation_peak_bytes), format_bytes(with_offload.activation_peak_bytes)
    )
    table.add_row("  reduced by", "", Text(f"{comparison.saved_fraction:.1%}", style="bold green"))
    if with_offload.activation_peak_place:
        table.add_row("  where the peak is now", "", with_offload.activation_peak_place)
    if without.allocator_peak_bytes is not None and with_offload.allocator_peak_bytes is not None:
        table.add_row(
            "allocator at peak", format_bytes(without.allocator_peak_bytes), format_bytes(with_offload.allocator_peak_bytes)
        )
    table.add_row("step time", _step_time(without), _step_time(with_offload), end_section=True)
    _add_transfer_rows(table, with_offload)
    _add_setting_rows(table, setting)
    return table


def describe_differences(comparison: Comparison) -> list[str]:
    """Return a sentence for losses and one for gradients, if they differ."""
    found = (("losses", comparison.find_loss_difference()), ("gradients", comparison.find_gradient_difference()))
    return [
        f"The {what} differ: first in step {difference.step}, {difference.what}. Please report this with the argument file."
        for what, difference in found
        if difference is not None
    ]


def build_single_table(record: RunRecord, setting: Setting) -> Table:
    """Return the table of a training without offload."""
    table = _start_table(setting, "without offload", record=record)
    for name, value in zip(*_loss_column(record), strict=True):
        table.add_row(name, value)
    table.add_row("activations at peak", format_bytes(record.activation_peak_bytes))
    if record.allocator_peak_bytes is not None:
        table.add_row("allocator at peak", format_bytes(record.allocator_peak_bytes))
    table.add_row("step time", _step_time(record))
    return table


def write_memory_plot(path: Path, records: dict[str, RunRecord], setting: Setting) -> None:
    """Write a plot of the activation bytes over one step."""
    # Imported here, since it takes as long as a short training. pyplot would need a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (label, record), color in zip(records.items(), ("#8a8f98", "#1f77b4"), strict=False):
        x, y = _step_curve(record)
        peak_mib = record.activation_peak_bytes / MIB
        peak = format_bytes(record.activation_peak_bytes)  # the same text as in the table
        axes.plot(x, y, drawstyle="steps-post", color=color, linewidth=1.6, label=f"{label}: peak {peak}")
        axes.fill_between(x, y, step="post", color=color, alpha=0.15, linewidth=0)
        axes.axhline(peak_mib, color=color, linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1.2 * max(record.activation_peak_bytes for record in records.values()) / MIB or 1)
    axes.set_xlabel("position in the step, by tensors saved and unpacked [%]")
    axes.set_ylabel("activations on the device [MiB]")
    axes.set_title(f"Activation memory over one step\n{setting.title}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False, ncols=len(records))
    with replacing(path) as partial:
        figure.savefig(partial, dpi=150)


def _start_table(setting: Setting, *columns: str, record: RunRecord) -> Table:
    measured = len(record.steps)
    timed = f"; step time: {_name_timed_steps(len(record.timed_steps))}" if record.timed_steps else ""
    table = Table(
        title=setting.title,
        caption=f"{setting.versions}\nmemory and bytes: step {measured}{timed}{_name_ranks(record.ranks)}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")  # may wrap: 80 columns have no room for all names beside the values
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _name_ranks(ranks: int) -> str:
    return "" if ranks == 1 else f"\n{ranks} ranks, all compared; memory and time: the maximum; bytes moved: the sum"


def _name_timed_steps(count: int) -> str:
    return "step 2" if count == 1 else f"median of steps 2 to {count + 1}"


def _loss_column(record: RunRecord) -> tuple[list[str], list[str]]:
    first, last = record.steps[0], record.steps[-1]
    return ["loss, step 1", f"loss, step {len(record.steps)}"], [f"{first.loss:.6f}", f"{last.loss:.6f}"]


def _yes_or_no(difference: Difference | None) -> Text:
    if difference is None:
        return Text("yes", style="bold green")
    return Text(f"no, from step {difference.step}", style="bold red")


def _step_time(record: RunRecord) -> str:
    seconds = record.find_step_seconds()
    return "needs 3 steps" if seconds is None else format_ms(seconds)


def _add_transfer_rows(table: Table, record: RunRecord) -> None:
    transfers = record.transfers
    if transfers is None:
        return
    for name, tag in transfers.tags.items():
        moved = f"{format_bytes(tag.d2h_bytes)} / {format_bytes(tag.h2d_bytes)}"
        table.add_row(f"{name}, to host / back", "", moved)
    for reason, kept_bytes in _sum_kept(record).items():
        table.add_row(f"kept: {reason}", "", format_bytes(kept_bytes))
    table.add_row("host memory at peak", "", format_bytes(transfers.host_peak_bytes))
    table.add_row(
        "prefetch misses / window waits", "", f"{transfers.prefetch_misses} / {transfers.window_waits}", end_section=True
    )


def _sum_kept(record: RunRecord) -> dict[str, int]:
    sums: dict[str, int] = {}
    for tag in record.transfers.tags.values() if record.transfers else ():
        for reason, kept_bytes in tag.kept_bytes.items():
            sums[reason] = sums.get(reason, 0) + kept_bytes
    return {reason: kept_bytes for reason, kept_bytes in sums.items() if kept_bytes}


def _add_setting_rows(table: Table, setting: Setting) -> None:
    if setting.offload is None:
        return
    table.add_row("minimum size", "", f"{setting.offload.min_offloaded_tensor_size} elements")
    table.add_row("window", "", format_bytes(setting.offload.offload_window_bytes))
    table.add_row("prefetch", "", format_bytes(setting.offload.offload_prefetch_bytes))


def _step_curve(record: RunRecord) -> tuple[Sequence[float], Sequence[float]]:
    """Return a step curve: x in percent of the step, y in MiB."""
    if not record.samples:
        return [0.0, 100.0], [0.0, 0.0]
    last = record.samples[-1].position or 1
    return [100 * sample.position / last for sample in record.samples], [s.resident_bytes / MIB for s in record.samples]
