"""From a rank's chunks and a plan to the steps of each pass: see `chunk_program`, and `layer_compiler` for those of a layer."""

import functools
from collections.abc import Hashable, Mapping, Sequence

from fgoffload.errors import PlanError
from fgoffload.plan import Action
from fgoffload.planner.ranks.rank_model import HOST_LAYER_S, ChunkModel, RankModel
from fgoffload.planner.simulation.chunk_program import ChunkProgram, GroupPlace, Parcel, Part, ReadStep, Step, TurnStep
from fgoffload.planner.simulation.layer_choice import ResolvedLayer, resolve_layer
from fgoffload.planner.simulation.layer_compiler import LayerCompiler, StepList

Actions = Mapping[tuple[int, int], Mapping[str, Action]]
"""What a plan says, by chunk and number of the layer, and there by tag or unit."""

_ChunkActions = tuple[tuple[tuple[str, Action], ...], ...]
"""What it says of the layers of a chunk, in order."""

_KNOWN_CHUNKS = 128
"""A plan is simulated after one that differs from it in a layer or two: its other chunks are known. All ranks of a pipeline
have no more, and a program of 61 layers takes a megabyte."""


def compile_rank(rank: RankModel, actions: Actions, *, loss_window_bytes: int | None = None) -> tuple[ChunkProgram, ...]:
    """Return what each chunk of `rank` does under a plan.

    Args:
        rank: The rank.
        actions: Of the plan.
        loss_window_bytes: As the plan says.

    Raises:
        PlanError: A layer cannot do what the plan says of it.
    """
    chosen = [_list_chosen(chunk, number, actions) for number, chunk in enumerate(rank.chunks)]
    numel = rank.min_offloaded_numel
    resolved = [_resolve_chunk(chunk, number, chosen[number], numel) for number, chunk in enumerate(rank.chunks)]
    # Where nothing leaves nobody waits behind copies or looks for them, and more stretches are one step.
    has_copies = any(layer.leaving for layers in resolved for layer in layers)
    return tuple(
        _compile_chunk(
            chunk,
            number,
            chosen[number],
            numel,
            has_copies=has_copies,
            has_engine=rank.has_engine,
            host_s=HOST_LAYER_S,
            turn=TurnStep(loss_window_bytes) if has_copies and number == rank.turning_chunk else None,
        )
        for number, chunk in enumerate(rank.chunks)
    )


def _list_chosen(chunk: ChunkModel, number: int, actions: Actions) -> _ChunkActions:
    return tuple(tuple(actions.get((number, layer.number), {}).items()) for layer in chunk.layers)


@functools.lru_cache(maxsize=_KNOWN_CHUNKS)
def _resolve_chunk(
    chunk: ChunkModel, number: int, chosen: _ChunkActions, min_offloaded_numel: int
) -> tuple[ResolvedLayer, ...]:
    resolved = []
    for layer, actions in zip(chunk.layers, chosen, strict=True):
        # The input of a stage is held by the pipeline's schedule until its backward: to move it would free nothing.
        is_held = layer is chunk.layers[0] and not chunk.first
        try:
            one = resolve_layer(
                layer.model,
                dict(actions),
                min_offloaded_numel=min_offloaded_numel,
                staying_tags=frozenset({"layer_input"}) if is_held else frozenset(),
            )
        except PlanError as error:
            raise PlanError(f"layers.{layer.number} of chunk {number}: {error}") from error
        resolved.append(one)
    return tuple(resolved)


@functools.lru_cache(maxsize=_KNOWN_CHUNKS)
def _compile_chunk(
    chunk: ChunkModel,
    number: int,
    chosen: _ChunkActions,
    min_offloaded_numel: int,
    *,
    has_copies: bool,
    has_engine: bool,
    host_s: float,
    turn: TurnStep | None,
) -> ChunkProgram:
    layers = [
        LayerCompiler(
            layer,
            resolved,
            dict(actions),
            has_copies=has_copies,
            dispatcher=None if has_engine else (number, layer.number),
            has_held_input=bool(chunk.first) and layer is chunk.layers[0],
            host_s=host_s,
        )
        for layer, actions, resolved in zip(
            chunk.layers, chosen, _resolve_chunk(chunk, number, chosen, min_offloaded_numel), strict=True
        )
    ]
    parcels: list[Parcel] = []
    groups: list[GroupPlace] = []
    for layer in layers:
        layer.number_groups(groups, parcels)
    shared = {tensor.name: tensor.size_bytes for layer in layers for tensor in layer.resolved.shared}
    return ChunkProgram(
        forward=_compile_forward(chunk, layers, turn),
        backward=_compile_backward(chunk, layers),
        groups=tuple(groups),
        parcels=tuple(parcels),
        base_bytes=chunk.saved_bytes + sum(shared.values()),
        staged_bytes=max((layer.resolved.staged_bytes for layer in layers), default=0),
        recompute_s=sum(layer.resolved.recompute_s for layer in layers),
        content=_list_content(chunk, (chosen, min_offloaded_numel, has_copies, host_s, turn)) if has_engine else object(),
    )


def _list_content(chunk: ChunkModel, rules: Hashable) -> Hashable:
    """Return all that a program is made of but the numbers of its layers, and of the chunk, which dispatchers alone ask for.

    Args:
        chunk: Which.
        rules: What a plan says of its layers in order, and what is asked of its engine.
    """
    models = tuple(layer.model for layer in chunk.layers)
    return models, chunk.first, chunk.last, chunk.saved_bytes, rules


def _compile_forward(chunk: ChunkModel, layers: Sequence[LayerCompiler], turn: TurnStep | None) -> tuple[Step, ...]:
    steps = StepList()
    for segment in chunk.first:
        steps.compute(Part(segment.name, segment.forward_pass_s, segment.forward_extra_bytes, 0))
    for layer in layers:
        layer.run_forward(steps)
    if turn is not None:
        steps.add(turn)
    for segment in chunk.last:
        steps.compute(Part(segment.name, segment.forward_pass_s, segment.forward_extra_bytes, 0))
    held = tuple(parcel for layer in layers for parcel in layer.held_parcels)
    if held:
        steps.add(ReadStep(held))
    return steps.finish()


def _compile_backward(chunk: ChunkModel, layers: Sequence[LayerCompiler]) -> tuple[Step, ...]:
    steps = StepList()
    for segment in reversed(chunk.last):
        steps.compute(Part(segment.name, segment.backward_s, segment.backward_extra_bytes, 0))
    for layer in reversed(layers):
        layer.run_backward(steps)
    for segment in reversed(chunk.first):
        steps.compute(Part(segment.name, segment.backward_s, segment.backward_extra_bytes, 0))
    return steps.finish()
