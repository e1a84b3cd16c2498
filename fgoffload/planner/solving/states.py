"""Treatments of a rank's layers, and the plan they form.

A program gives the number of layers of a kind with each treatment; this file chooses the layers. Early layers have the most
time before backward needs them, so those that keep least come first. But copies queue behind each other, at most a window
behind forward and a prefetch ahead of backward: where that binds, an even load is better.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence

from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.solving.program import ProgramResult
from fgoffload.planner.solving.treatments import KEEP, Treatment, measure_treatment


class Order(enum.Enum):
    """Order of treatments over the layers of a chunk."""

    FIRST = "first"  # the first layers of forward offload most: compute would wait for the last ones
    EVEN = "even"  # all layers offload about as much, so that no copy queues for long


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlot:
    """A layer of a rank, which gets a treatment."""

    chunk: int
    """Model chunk on the rank."""
    number: int
    """Number of the layer in the whole model."""
    layer: LayerModel
    """Kind of the layer."""


State = tuple[Treatment, ...]
"""Treatments of a rank's layers, in the order of `list_slots`."""


def list_slots(rank: RankModel) -> tuple[LayerSlot, ...]:
    """Return the layers of a rank, chunk by chunk, in forward order."""
    return tuple(
        LayerSlot(chunk=number, number=layer.number, layer=layer.model)
        for number, chunk in enumerate(rank.chunks)
        for layer in chunk.layers
    )


def keep_all(slots: Sequence[LayerSlot]) -> State:
    """Return the state in which every layer keeps everything."""
    return (KEEP,) * len(slots)


def make_key(state: State) -> object:
    """Return a key that is equal for states with the same treatments."""
    return tuple(treatment.actions for treatment in state)


def place_counts(result: ProgramResult, slots: Sequence[LayerSlot], order: Order) -> State:
    """Return a state with the counts of a program.

    Args:
        result: Solution of the program.
        slots: The layers of its rank.
        order: Order of treatments over the layers of a chunk.
    """
    waiting = {
        (number, kind): _spread(counts, order)
        for number, chunk in enumerate(result.chunks)
        for kind, counts in chunk.inner.items()
    }
    state: list[Treatment] = []
    for slot, following in zip(slots, (*slots[1:], None), strict=True):
        last = result.chunks[slot.chunk].last
        is_last = following is None or following.chunk != slot.chunk
        state.append(last if is_last and last is not None else next(waiting[slot.chunk, slot.layer.kind]))
    return tuple(state)


def make_plan(placed: Iterable[tuple[Sequence[LayerSlot], State]], *, loss_window_bytes: int | None = None) -> OffloadPlan:
    """Return the plan of several ranks, with a row for each site that is not kept.

    Args:
        placed: Layers of each rank, and their treatments.
        loss_window_bytes: As in the plan.
    """
    actions: dict[Site, Action] = {}
    for slots, state in placed:
        for slot, treatment in zip(slots, state, strict=True):
            for tag, action in treatment.actions:
                actions[Site(chunk=slot.chunk, layer=slot.number, tag=tag)] = action
    return OffloadPlan(actions=actions, loss_window_bytes=loss_window_bytes)


def read_plan(plan: OffloadPlan, rank: RankModel) -> State:
    """Return the treatments that `plan` gives the layers of a rank.

    Raises:
        PlanError: The plan does not suit a layer.
    """
    chosen: dict[tuple[int, int], dict[str, Action]] = {}
    for site, action in plan.actions.items():
        chosen.setdefault((site.chunk, site.layer), {})[site.tag] = action
    numel = rank.min_offloaded_numel
    return tuple(
        measure_treatment(slot.layer, chosen.get((slot.chunk, slot.number), {}), min_offloaded_numel=numel)
        for slot in list_slots(rank)
    )


def _spread(counts: Sequence[tuple[Treatment, int]], order: Order) -> Iterator[Treatment]:
    """Return the treatments of one kind of layers in forward order, without the last layer of the chunk."""
    found = [treatment for treatment, layers in counts for _ in range(layers)]
    found.sort(key=lambda one: (one.kept_bytes, -one.moved_bytes))
    if order is Order.FIRST:
        return iter(found)
    places = sorted(range(len(found)), key=lambda place: (place * _GOLDEN) % 1.0)
    return iter([one for _, one in sorted(zip(places, found, strict=True), key=lambda pair: pair[0])])


_GOLDEN = 0.618033988749895
"""Golden ratio: the fractional parts of its multiples are spread as evenly over 0 to 1 as those of any number."""
