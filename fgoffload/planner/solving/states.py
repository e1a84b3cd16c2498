"""Treatments of a rank's layers, and the plan they form."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import PassKind
from fgoffload.planner.solving.peak_times import list_in_flight
from fgoffload.planner.solving.treatments import Treatment, measure_treatment


class LayerSlot(NamedTuple):
    """A layer of a rank, which gets a treatment."""

    chunk: int  # model chunk on the rank
    number: int  # number of the layer in the whole model
    layer: LayerModel  # kind of the layer
    microbatches: int  # microbatches of a step
    in_flight: int  # microbatches in flight when the layers together keep most


State = tuple[Treatment, ...]
"""Treatments of a rank's layers, in the order of `list_slots`."""


def list_slots(rank: RankModel) -> tuple[LayerSlot, ...]:
    """Return the layers of a rank, chunk by chunk, in forward order."""
    sizes = [sum(layer.model.saved_bytes for layer in chunk.layers) for chunk in rank.chunks]
    vectors = list_in_flight(rank.passes, len(rank.chunks))
    most = max(vectors, key=lambda vector: (sum(count * size for count, size in zip(vector, sizes, strict=True)), vector))
    backwards = [one.chunk for one in rank.passes if one.kind is PassKind.BACKWARD]
    return tuple(
        LayerSlot(number, layer.number, layer.model, backwards.count(number), most[number])
        for number, chunk in enumerate(rank.chunks)
        for layer in chunk.layers
    )


def make_key(state: State) -> object:
    """Return a key that is equal for states with the same treatments."""
    return tuple(treatment.actions for treatment in state)


def make_plan(placed: Iterable[tuple[Sequence[LayerSlot], State]], *, loss_window_bytes: int | None = None) -> OffloadPlan:
    """Return the plan of several ranks from their layers and treatments, with a row for each site that is not kept."""
    actions: dict[Site, Action] = {}
    for slots, state in placed:
        for slot, treatment in zip(slots, state, strict=True):
            for tag, action in treatment.actions:
                actions[Site(chunk=slot.chunk, layer=slot.number, tag=tag)] = action
    return OffloadPlan(actions=actions, loss_window_bytes=loss_window_bytes)


def read_plan(plan: OffloadPlan, rank: RankModel) -> State:
    """Return the treatments that `plan` gives the layers of a rank."""
    chosen: dict[tuple[int, int], dict[str, Action]] = {}
    for site, action in plan.actions.items():
        chosen.setdefault((site.chunk, site.layer), {})[site.tag] = action
    numel = rank.min_offloaded_numel
    return tuple(
        measure_treatment(slot.layer, chosen.get((slot.chunk, slot.number), {}), min_offloaded_numel=numel)
        for slot in list_slots(rank)
    )
