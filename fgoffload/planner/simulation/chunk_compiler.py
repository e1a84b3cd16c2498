"""Compiles a rank's model chunks into the events of each pass under a plan. `layer_compiler` compiles the layers."""

import functools
from collections.abc import Mapping, Sequence

from fgoffload.errors import PlanError
from fgoffload.plan import Action
from fgoffload.planner.ranks.rank_model import HOST_LAYER_S, ChunkModel, RankModel
from fgoffload.planner.simulation.chunk_events import Bundle, CompiledChunk, EventKind, Events, PlacedGroup
from fgoffload.planner.simulation.layer_choice import ResolvedLayer, resolve_layer
from fgoffload.planner.simulation.layer_compiler import EventList, LayerCompiler, LayerRules

Actions = Mapping[tuple[int, int], Mapping[str, Action]]
"""Actions of a plan, keyed by chunk and layer number, then by tag or unit."""

_ChunkActions = tuple[tuple[tuple[str, Action], ...], ...]  # actions of a chunk's layers, in order

_CACHED_CHUNKS = 128
"""Maximum number of chunks in each cache. Consecutive plans in a search differ in only a few chunks."""


def compile_rank(
    rank: RankModel, actions: Actions, *, loss_window_bytes: int | None = None, merges: bool = True
) -> tuple[CompiledChunk, ...]:
    """Compile the chunks of `rank` under a plan."""
    chosen = [
        tuple(tuple(actions.get((number, layer.number), {}).items()) for layer in chunk.layers)
        for number, chunk in enumerate(rank.chunks)
    ]
    parts = list(zip(rank.chunks, range(len(rank.chunks)), chosen, strict=True))
    numel = rank.min_offloaded_numel
    # If nothing is offloaded, we omit the events that wait or poll for copies, so that more segments merge into one event.
    has_copies = any(layer.offloaded for part in parts for layer in _resolve_chunk(*part, numel))
    rules = LayerRules(has_copies=has_copies, has_engine=rank.has_engine, host_s=HOST_LAYER_S, merges=merges)
    turning = rank.turning_chunk if has_copies else None
    return tuple(
        _compile_chunk(*part, numel, rules, turn=(loss_window_bytes,) if number == turning else ())
        for number, part in enumerate(parts)
    )


@functools.lru_cache(maxsize=_CACHED_CHUNKS)
def _resolve_chunk(
    chunk: ChunkModel, number: int, chosen: _ChunkActions, min_offloaded_numel: int
) -> tuple[ResolvedLayer, ...]:
    resolved = []
    for layer, actions in zip(chunk.layers, chosen, strict=True):
        # The pipeline schedule references a stage's input until backward, so offloading the input would free nothing.
        is_referenced = layer is chunk.layers[0] and not chunk.first
        try:
            one = resolve_layer(
                layer.model,
                dict(actions),
                min_offloaded_numel=min_offloaded_numel,
                staying_tags=frozenset({"layer_input"}) if is_referenced else frozenset(),
            )
        except PlanError as error:
            raise PlanError(f"layers.{layer.number} of chunk {number}: {error}") from error
        resolved.append(one)
    return tuple(resolved)


@functools.lru_cache(maxsize=_CACHED_CHUNKS)
def _compile_chunk(
    chunk: ChunkModel,
    number: int,
    chosen: _ChunkActions,
    min_offloaded_numel: int,
    rules: LayerRules,
    *,
    turn: tuple[int | None, ...],
) -> CompiledChunk:
    resolved = _resolve_chunk(chunk, number, chosen, min_offloaded_numel)
    bundles: list[Bundle] = []
    groups: list[PlacedGroup] = []
    layers = []
    for numbered, one in zip(chunk.layers, resolved, strict=True):
        is_referenced = bool(chunk.first) and numbered is chunk.layers[0]
        layers.append(LayerCompiler(numbered, number, one, rules, has_referenced_input=is_referenced))
        layers[-1].add_groups(groups, bundles)
    shared = {tensor.name: tensor.size_bytes for one in resolved for tensor in one.shared}
    return CompiledChunk(
        forward=_list_forward(chunk, layers, turn, merges=rules.merges),
        backward=_list_backward(chunk, layers, merges=rules.merges),
        groups=tuple(groups),
        bundles=tuple(bundles),
        base_bytes=chunk.saved_bytes + sum(shared.values()),
        staged_bytes=max((one.staged_bytes for one in resolved), default=0),
        recompute_s=sum(one.recompute_s for one in resolved),
    )


def _list_forward(chunk: ChunkModel, layers: Sequence[LayerCompiler], turn: tuple[int | None, ...], *, merges: bool) -> Events:
    events = EventList(merges=merges)
    for segment in chunk.first:
        events.run_forward(segment)
    for layer in layers:
        layer.run_forward(events)
    for window_bytes in turn:
        events.add(EventKind.TURN, window_bytes)
    for segment in chunk.last:
        events.run_forward(segment)
    if read := tuple(bundle for layer in layers for bundle in layer.list_read_last()):
        events.add(EventKind.READ, read)
    return events.finish()


def _list_backward(chunk: ChunkModel, layers: Sequence[LayerCompiler], *, merges: bool) -> Events:
    events = EventList(merges=merges)
    for segment in reversed(chunk.last):
        events.run_backward(segment)
    for layer in reversed(layers):
        layer.run_backward(events)
    for segment in reversed(chunk.first):
        events.run_backward(segment)
    return events.finish()
