"""Small ranks for hand calculations, for tests of the simulator."""

from fgoffload import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor, Segment
from fgoffload.planner.ranks.rank_model import ChunkModel, LinkModel, NumberedLayer, RankModel
from fgoffload.planner.ranks.schedule import Pass, PassKind, Pipeline, list_passes
from fgoffload.transfer_schedule import TransferPolicy

STATIC_BYTES = 1000


def make_layer(saved, *, forward_s=20.0, backward_s=40.0, units=(), host_waits=None, **fields):
    """Return a layer with a segment for each tag of `saved`.

    Args:
        saved: The saved bytes of each segment, by tag.
        forward_s: The forward time of each segment.
        backward_s: The backward time of each segment.
        units: The recompute units.
        host_waits: The host wait before a segment, by tag.
        fields: Other fields of all segments.
    """
    waits = host_waits or {}
    segments = tuple(
        Segment(name=tag, forward_s=forward_s, backward_s=backward_s, host_wait=waits.get(tag), **fields) for tag in saved
    )
    tensors = tuple(SavedTensor(name=tag, tags=(tag,), size_bytes=size, element_bytes=1) for tag, size in saved.items() if size)
    return LayerModel(kind="+".join(saved), segments=segments, tensors=tensors, units=units)


def make_chunk(*layers, first_number=0, **fields):
    """Return a chunk of `layers`, numbered from `first_number`."""
    numbered = tuple(NumberedLayer(number=number, model=layer) for number, layer in enumerate(layers, start=first_number))
    return ChunkModel(layers=numbered, **fields)


def make_link(*, d2h=10.0, h2d=10.0, duplex=10.0, **fields):
    """Return a link with rates in bytes a second."""
    return LinkModel(d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d, duplex_bytes_per_s=duplex, **fields)


def make_rank(*chunks, rank=0, pipeline=None, passes=None, link=None, window_bytes=10**6, prefetch_bytes=10**6, **fields):
    """Return a rank of `pipeline`, by default one microbatch on one stage."""
    if passes is None:
        passes = list_passes(pipeline or Pipeline(microbatches=1), rank=rank)
    return RankModel(
        rank=rank,
        static_bytes=STATIC_BYTES,
        chunks=chunks,
        passes=passes,
        link=link or make_link(),
        policy=TransferPolicy(window_bytes=window_bytes, prefetch_bytes=prefetch_bytes),
        min_offloaded_numel=fields.pop("min_offloaded_numel", 0),
        **fields,
    )


def make_plan(actions, *, chunk=0):
    """Return a plan from actions by (layer, tag)."""
    return OffloadPlan(actions={Site(chunk=chunk, layer=layer, tag=tag): action for (layer, tag), action in actions.items()})


def offload(tag, layers, *, chunk=0):
    """Return the plan that offloads `tag` in `layers`."""
    return make_plan({(layer, tag): Action.OFFLOAD for layer in layers}, chunk=chunk)


def read_passes(text):
    """Parse passes, such as `F0 F1 B0 B1.1` (microbatch.chunk)."""
    kinds = {"F": PassKind.FORWARD, "B": PassKind.BACKWARD}
    passes = []
    for word in text.split():
        microbatch, _, chunk = word[1:].partition(".")
        passes.append(Pass(kind=kinds[word[0]], chunk=int(chunk or 0), microbatch=int(microbatch)))
    return tuple(passes)
