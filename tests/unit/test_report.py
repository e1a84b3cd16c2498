import io

import pytest
from rich.console import Console

from fgoffload.benchmark.steps import StepRecord
from fgoffload.cli.comparison import Comparison, MemorySample, RunRecord, TagTransfer, Transfers
from fgoffload.cli.report import Setting, build_comparison_table, describe_differences, write_memory_plot
from fgoffload.config import OffloadConfig

MIB = 2**20
SETTING = Setting(
    arguments_file="arguments/x.sh",
    layers=4,
    device="CPU",
    versions="torch 1, megatron-core 2",
    offload=OffloadConfig(offload_modules=("core_attn", "moe_act"), min_offloaded_tensor_size=64),
)
TRANSFERS = Transfers(
    tags={
        "core_attn": TagTransfer(d2h_bytes=3 * MIB, h2d_bytes=2 * MIB, kept_bytes={"below the minimum size": 100}),
        "moe_act": TagTransfer(d2h_bytes=MIB, h2d_bytes=MIB, kept_bytes={"below the minimum size": 28, "no elements": 0}),
    },
    host_peak_bytes=5 * MIB,
    prefetch_misses=6,
    window_waits=7,
)


def make_run(peak_mib, *, steps=4, digest="11", transfers=None, allocator_mib=None, place=""):
    return RunRecord(
        steps=tuple(
            StepRecord(losses=(1.0 + step, 2.0 + step), gradient_digests={"a.weight": digest}, seconds=step)
            for step in range(steps)
        ),
        activation_peak_bytes=peak_mib * MIB,
        activation_peak_place=place,
        samples=(MemorySample(1, 0), MemorySample(2, peak_mib * MIB), MemorySample(3, 0)),
        allocator_peak_bytes=None if allocator_mib is None else allocator_mib * MIB,
        transfers=transfers,
    )


def read_rows(table):
    """Return the cells by row, as they are shown."""
    stream = io.StringIO()
    Console(file=stream, width=120).print(table)
    rows = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in stream.getvalue().splitlines() if "│" in line]
    return {cells[0]: cells[1:] for cells in rows}, stream.getvalue()


def test_the_table_shows_both_trainings_and_what_moved():
    comparison = Comparison(without=make_run(10), with_offload=make_run(6, transfers=TRANSFERS))
    rows, shown = read_rows(build_comparison_table(comparison, SETTING))
    assert rows == {
        "loss, step 1": ["1.500000", "1.500000"],
        "loss, step 4": ["4.500000", "4.500000"],
        "losses equal to the bit": ["", "yes"],
        "gradients equal to the bit": ["", "yes"],
        "activations at peak": ["10.00 MiB", "6.00 MiB"],
        "less by": ["", "40.0%"],
        "step time": ["1500.0 ms", "1500.0 ms"],
        "core_attn, to host / back": ["", "3.00 MiB / 2.00 MiB"],
        "moe_act, to host / back": ["", "1.00 MiB / 1.00 MiB"],
        "kept: below the minimum size": ["", "128 B"],
        "host memory at peak": ["", "5.00 MiB"],
        "prefetch misses / window waits": ["", "6 / 7"],
        "minimum size": ["", "64 elements"],
        "window": ["", "1.00 GiB"],
        "prefetch": ["", "512.00 MiB"],
    }
    assert describe_differences(comparison) == []
    assert "arguments/x.sh: 4 layers on CPU" in shown
    assert "torch 1, megatron-core 2 " in shown
    assert "memory and bytes: step 4; step time: median of steps 2 to 3 " in shown


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_plot_is_a_picture_of_the_format_that_its_name_says(tmp_path, suffix, beginning):
    path = tmp_path / f"memory{suffix}"
    write_memory_plot(path, {"without offload": make_run(10), "with offload": make_run(6)}, SETTING)
    assert path.read_bytes().startswith(beginning)
