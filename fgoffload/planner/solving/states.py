"""Treatments of a rank's layers, and the plan they form.

A program says how many layers of a kind get which treatment; which layers these are is chosen here. What is offloaded first has
the longest way back, so in forward order whoever keeps least comes first. But copies wait for each other, and may run only a
window behind forward and a prefetch ahead of backward: where that binds, layers that share the load are better.
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
    """How treatments are spread over the layers of a chunk."""

    FIRST = "first"  # the first layers of forward move most: the last ones would be waited for
    EVEN = "even"  # all layers move about as much, so that no copy waits long for the one before


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlot:
    """A layer of a rank, that has to choose."""

    chunk: int
    """Model chunk on the rank."""
    number: int
    """Of the layer in the whole model."""
    layer: LayerModel
    """Its kind."""


State = tuple[Treatment, ...]
"""Treatments of a rank's layers, in the order of `list_slots`."""


def list_slots(rank: RankModel) -> tuple[LayerSlot, ...]:
    """Return the layers of a rank, chunk by chunk, in the order of forward."""
    return tuple(
        LayerSlot(chunk=number, number=layer.number, layer=layer.model)
        for number, chunk in enumerate(rank.chunks)
        for layer in chunk.layers
    )


def keep_all(slots: Sequence[LayerSlot]) -> State:
    """Return the state in which every layer keeps everything."""
    return (KEEP,) * len(slots)


def make_key(state: State) -> object:
    """Return what is equal for states that do the same."""
    return tuple(treatment.actions for treatment in state)


def place_counts(result: ProgramResult, slots: Sequence[LayerSlot], order: Order) -> State:
    """Return a state that has the counts of a program.

    Args:
        result: What the program came to.
        slots: The layers of its rank.
        order: Which of the layers of a chunk do what.
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
    """Return the plan of several ranks: the rows of whatever is not kept.

    Args:
        placed: Of each rank its layers, and what they do.
        loss_window_bytes: As the plan is to say.
    """
    actions: dict[Site, Action] = {}
    for slots, state in placed:
        for slot, treatment in zip(slots, state, strict=True):
            for tag, action in treatment.actions:
                actions[Site(chunk=slot.chunk, layer=slot.number, tag=tag)] = action
    return OffloadPlan(actions=actions, loss_window_bytes=loss_window_bytes)


def read_plan(plan: OffloadPlan, rank: RankModel) -> State:
    """Return what `plan` says of the layers of a rank.

    Raises:
        PlanError: A layer cannot do that.
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
    """Return what the layers of one kind do, all but the last of the chunk, in the order of forward."""
    found = [treatment for treatment, layers in counts for _ in range(layers)]
    found.sort(key=lambda one: (one.kept_bytes, -one.moved_bytes))
    if order is Order.FIRST:
        return iter(found)
    places = sorted(range(len(found)), key=lambda place: (place * _GOLDEN) % 1.0)
    return iter([one for _, one in sorted(zip(places, found, strict=True), key=lambda pair: pair[0])])


_GOLDEN = 0.618033988749895
"""Its multiples, without their whole part, lie as evenly between 0 and 1 as those of any number."""
