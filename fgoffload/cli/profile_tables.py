"""Builds the tables of `fgoffload profile`."""

from collections.abc import Iterator

from rich.table import Table

from fgoffload.cli.console import make_table
from fgoffload.planner.host_overhead import MOST_SLOWDOWN, find_group_s
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.timing.link_profile import LinkProfile
from fgoffload.planner.timing.profile import DEFAULT_TOLERANCE, Profile, RankProfile, merge_alike
from fgoffload.units import format_bytes, format_ms


def build_tables(profile: Profile) -> Iterator[Table]:
    """Yield a table of the link, and a table for each kind of layer on each pipeline rank."""
    yield _build_link_table(profile.link)
    for rank in profile.ranks:
        models = [layer.model for layer in rank.layers]
        kinds = merge_alike(models, tolerance=DEFAULT_TOLERANCE)
        for model in dict.fromkeys(kinds.values()):
            numbers = [str(layer.number) for layer in rank.layers if kinds[layer.model.kind] is model]
            where = f"rank {rank.rank}, " if len(profile.ranks) > 1 else ""
            title = f"{where}layer{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {model.kind.split(' ')[0]}"
            yield _build_layer_table(model, title)


def describe_rank(rank: RankProfile) -> str:
    """Describe the step time and memory of a pipeline rank."""
    peak = "not counted on this device" if rank.peak_bytes is None else format_bytes(rank.peak_bytes)
    return (
        f"rank {rank.rank}: step {format_ms(rank.step_s)}, including {format_ms(rank.step_end_s)} after the last backward; "
        f"static memory {format_bytes(rank.static_bytes)}, peak {peak}"
    )


def describe_compared_steps(profile: Profile, slowdown: float) -> str:
    """Describe the step times measured under trial plans, and the slowdown that the planner derives from them."""
    ratios = " and ".join(f"{step.step_s / step.keeping_step_s:.3f}" for step in profile.compared_steps)
    bound = " (the maximum)" if slowdown >= MOST_SLOWDOWN else ""
    return (
        f"steps under trial plans took {ratios} times as long as the baseline. Plans assume that copies slow compute by "
        f"{slowdown:.1%}{bound}, and that each offloaded group costs {1e3 * find_group_s(slowdown):.2f} ms"
    )


def _build_link_table(link: LinkProfile) -> Table:
    caption = f"a matrix product takes {link.compute_slowdown:.1%} longer during copies"
    headings = ("copy size", "to host", "to device", "duplex, each way")
    table = make_table(right=headings, title="link to the host, GB/s", caption=caption)
    for copy in link.copies:
        rates = (copy.d2h_bytes_per_s, copy.h2d_bytes_per_s, copy.duplex_bytes_per_s)
        table.add_row(format_bytes(copy.size_bytes), *(f"{rate / 1e9:.1f}" for rate in rates))
    return table


def _build_layer_table(layer: LayerModel, title: str) -> Table:
    saved = {
        segment.name: sum(tensor.size_bytes for tensor in layer.tensors if segment.name in tensor.tags)
        for segment in layer.segments
    }
    units = ", ".join(unit.name for unit in layer.units) or "none"
    caption = (
        f"forward {format_ms(layer.forward_s)}, backward {format_ms(layer.backward_s)}, saves "
        f"{format_bytes(layer.saved_bytes)} per microbatch; bitwise identical when recomputed: {units}"
    )
    table = make_table(left=("segment",), right=("forward ms", "backward ms", "saves"), title=title, caption=caption)
    for segment in layer.segments:
        size = format_bytes(saved[segment.name]) if saved[segment.name] else "-"
        table.add_row(segment.name, f"{1e3 * segment.forward_s:.3f}", f"{1e3 * segment.backward_s:.3f}", size)
    return table
