"""Converts treatments of a rank's layers to plans and back, and shortens the steps that the search simulates."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.simulator import group_by_layer
from fgoffload.planner.solving.treatments import Treatment, measure_treatment


@functools.lru_cache(maxsize=64)
def list_in_flight(passes: tuple[Pass, ...], chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the distinct numbers of microbatches in flight between passes, each as a tuple with one number per chunk."""
    return tuple({in_flight for _, in_flight, _ in _list_gaps(passes, chunks)})


class LayerSlot(NamedTuple):
    """A layer of a rank, with the numbers that the solver needs to choose its treatment."""

    chunk: int  # model chunk on the rank
    number: int  # layer number in the whole model
    layer: LayerModel
    microbatches: int  # per step
    in_flight: int  # microbatches in flight when the rank's layers together hold the most bytes


State = tuple[Treatment, ...]
"""Treatments of a rank's layers, in the order of `list_slots`."""


def list_slots(rank: RankModel) -> tuple[LayerSlot, ...]:
    """Return the layers of a rank, chunk by chunk, in forward order."""
    sizes = [sum(layer.model.saved_bytes for layer in chunk.layers) for chunk in rank.chunks]
    _, most = find_fullest(rank, sizes)
    backwards = [one.chunk for one in rank.passes if one.kind is PassKind.BACKWARD]
    return tuple(
        LayerSlot(number, layer.number, layer.model, backwards.count(number), most[number])
        for number, chunk in enumerate(rank.chunks)
        for layer in chunk.layers
    )


def find_fullest(rank: RankModel, sizes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the maximum of bytes in flight, and its microbatches by chunk. `sizes` are the bytes per microbatch by chunk."""
    vectors = list_in_flight(rank.passes, len(rank.chunks))
    return max((sum(count * size for count, size in zip(vector, sizes, strict=True)), vector) for vector in vectors)


def make_key(state: State) -> object:
    """Return a key that is equal for states with the same treatments."""
    return tuple(treatment.actions for treatment in state)


def make_plan(placed: Iterable[tuple[Sequence[LayerSlot], State]], *, loss_window_bytes: int | None = None) -> OffloadPlan:
    """Combine the treatments of several ranks into a plan, with an action for each site that is not kept."""
    actions: dict[Site, Action] = {}
    for slots, state in placed:
        for slot, treatment in zip(slots, state, strict=True):
            for tag, action in treatment.actions:
                actions[Site(chunk=slot.chunk, layer=slot.number, tag=tag)] = action
    return OffloadPlan(actions=actions, loss_window_bytes=loss_window_bytes)


def read_plan(plan: OffloadPlan, rank: RankModel) -> State:
    """Return the treatments of a rank's layers under `plan`."""
    chosen, numel = group_by_layer(plan), rank.min_offloaded_numel
    return tuple(
        measure_treatment(slot.layer, chosen.get((slot.chunk, slot.number), {}), min_offloaded_numel=numel)
        for slot in list_slots(rank)
    )


def shorten(rank: RankModel) -> RankModel:
    """Return `rank` with fewer microbatches: at least two more than are ever in flight, and enough for all transitions.

    The removed microbatches only repeat transitions between passes, so a plan has the same effect on the shorter step.
    """
    chunks = len(rank.chunks)
    places = _list_places(rank.passes, chunks)
    most = max((count for _, in_flight, _ in places for count in in_flight), default=0)
    for microbatches in range(most + 2, 2 * most + 2):
        passes = tuple(one for one in rank.passes if one.microbatch < microbatches)
        if _list_places(passes, chunks) == places:
            return dataclasses.replace(rank, passes=passes)
    return rank


def _list_places(passes: Sequence[Pass], chunks: int) -> set[Any]:
    return {
        ((before.kind, before.chunk), in_flight, after and (after.kind, after.chunk))
        for before, in_flight, after in _list_gaps(passes, chunks)
    }


def _list_gaps(passes: Sequence[Pass], chunks: int) -> Iterator[tuple[Pass, tuple[int, ...], Pass | None]]:
    """Yield each pass with the number of microbatches in flight after it, by chunk, and the next pass."""
    current = [0] * chunks
    for one, following in zip(passes, (*passes[1:], None), strict=True):
        current[one.chunk] += 1 if one.kind is PassKind.FORWARD else -1
        yield one, tuple(current), following
