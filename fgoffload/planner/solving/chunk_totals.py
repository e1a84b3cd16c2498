"""What the chunks of a rank take where nothing is planned: what a program of it begins with."""

from collections.abc import Iterator

from fgoffload.planner.ranks.layer_model import Segment
from fgoffload.planner.ranks.rank_model import ChunkModel, RankModel
from fgoffload.planner.solving.moments import count_backwards


def count_step_s(rank: RankModel) -> float:
    """Return the seconds that a step takes on a rank that keeps all and never waits."""
    step_s = rank.step_end_s
    for number, chunk in enumerate(rank.chunks):
        seconds = sum(segment.forward_pass_s + segment.backward_s for segment in _list_segments(chunk))
        step_s += seconds * count_backwards(rank.passes, chunk=number)
    return step_s


def count_copy_room_s(rank: RankModel, chunk: ChunkModel) -> float:
    """Return for how many seconds copies to the host may run that forward of a chunk submits, before it has to wait for them.

    What comes behind the last layer does not count: when that one ends no more than a window may be on its way.
    """
    layers = (segment for layer in chunk.layers for segment in layer.model.segments)
    forward_s = sum(segment.forward_pass_s for segment in (*chunk.first, *layers))
    return forward_s + rank.policy.window_bytes / rank.link.d2h_bytes_per_s


def count_fixed_bytes(chunk: ChunkModel) -> int:
    """Return what a microbatch keeps in a chunk where its layers keep all, with what all layers share counted once."""
    shared = {
        tensor.name: tensor.size_bytes
        for layer in chunk.layers
        for tensor in layer.model.tensors
        if tensor.is_same_in_all_layers
    }
    return chunk.saved_bytes + sum(layer.model.saved_bytes for layer in chunk.layers) + sum(shared.values())


def count_extra_bytes(chunk: ChunkModel) -> int:
    """Return the most that what is before and behind the layers has beside what is saved."""
    ends = (*chunk.first, *chunk.last)
    return max((max(segment.forward_extra_bytes, segment.backward_extra_bytes) for segment in ends), default=0)


def _list_segments(chunk: ChunkModel) -> Iterator[Segment]:
    yield from chunk.first
    for layer in chunk.layers:
        yield from layer.model.segments
    yield from chunk.last
