"""The tables of `fgoffload profile`."""

from collections.abc import Iterator

from rich.table import Table

from fgoffload.planner.host_slowdown import MOST_SLOWDOWN, find_group_s
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.timing.link_profile import LinkProfile
from fgoffload.planner.timing.profile import DEFAULT_TOLERANCE, Profile, RankProfile, merge_alike
from fgoffload.units import format_bytes, format_ms


def build_tables(profile: Profile) -> Iterator[Table]:
    """Yield a table of the link, and one for each kind of layer of each pipeline rank."""
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
    """Return what the step of a pipeline rank took."""
    peak = "not counted on this device" if rank.peak_bytes is None else format_bytes(rank.peak_bytes)
    return (
        f"rank {rank.rank}: step {format_ms(rank.step_s)}, of it {format_ms(rank.step_end_s)} behind the last backward; "
        f"{format_bytes(rank.static_bytes)} there all the time, peak {peak}"
    )


def describe_plain_step(profile: Profile, plain_step_s: float) -> str:
    """Return what a step takes without measuring, and what plans make of that."""
    segments = (segment for rank in profile.ranks for layer in rank.layers for segment in layer.model.segments)
    if len(profile.ranks) == 1 and not any(segment.host_wait for segment in segments):
        use = "where it takes more than measured, all compute is taken to be as much longer"
    else:
        use = "what it takes more than measured is the host's, and comes on top of the step"
    return f"plain step, with nothing measured in it: {format_ms(plain_step_s)}; {use}"


def describe_compared_steps(profile: Profile, slowdown: float) -> str:
    """Return what steps under plans took, and what plans make of that."""
    ratios = " and ".join(f"{step.step_s / step.keeping_step_s:.3f}" for step in profile.compared_steps)
    many = "steps under plans" if len(profile.compared_steps) > 1 else "a step under a plan"
    bound = ", the most that is planned with" if slowdown >= MOST_SLOWDOWN else ""
    return (
        f"{many}, in turn with steps that keep all, took {ratios} of these: compute is planned to be {slowdown:.1%} slower "
        f"beside copies{bound}, and each group that leaves to cost {1e3 * find_group_s(slowdown):.2f} ms"
    )


def _build_link_table(link: LinkProfile) -> Table:
    table = Table(
        title="link to the host, GB/s", caption=f"a matrix product beside copies takes {link.compute_slowdown:.1%} longer"
    )
    for heading in ("copies of", "to host", "to device", "both, each way"):
        table.add_column(heading, justify="right")
    for copy in link.copies:
        rates = (copy.d2h_bytes_per_s, copy.h2d_bytes_per_s, copy.duplex_bytes_per_s)
        table.add_row(format_bytes(copy.size_bytes), *(f"{rate / 1e9:.1f}" for rate in rates))
    return table


def _build_layer_table(layer: LayerModel, title: str) -> Table:
    saved = {
        segment.name: sum(tensor.size_bytes for tensor in layer.tensors if segment.name in tensor.tags)
        for segment in layer.segments
    }
    units = ", ".join(unit.name for unit in layer.units) or "nothing"
    table = Table(
        title=title,
        caption=f"forward {format_ms(layer.forward_s)}, backward {format_ms(layer.backward_s)}, saves "
        f"{format_bytes(layer.saved_bytes)} a microbatch; can run again with equal bits: {units}",
    )
    table.add_column("stretch")
    for heading in ("forward ms", "backward ms", "saves"):
        table.add_column(heading, justify="right")
    for segment in layer.segments:
        size = format_bytes(saved[segment.name]) if saved[segment.name] else "-"
        table.add_row(segment.name, f"{1e3 * segment.forward_s:.3f}", f"{1e3 * segment.backward_s:.3f}", size)
    return table
