"""Which layers make the choices that a program counted, and the plan of a rank that comes of it.

The program says how many layers of a kind do what; where they lie is chosen here. What leaves first has the longest way back,
so in forward order whoever keeps least comes first. But copies wait for each other, and may run only a window behind forward
and a prefetch ahead of backward: where that binds, layers that share the load are better. The simulator says which.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fgoffload.errors import PlanError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.solving.choices import Choice, Configuration, Mode, find_configuration, list_needs
from fgoffload.planner.solving.program import ProgramResult


class Order(enum.Enum):
    """How choices are spread over the layers of a chunk."""

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


State = tuple[Configuration, ...]
"""What the layers of a rank do, in the order of `list_slots`."""


def list_slots(rank: RankModel) -> tuple[LayerSlot, ...]:
    """Return the layers of a rank, chunk by chunk, in the order of forward."""
    return tuple(
        LayerSlot(chunk=number, number=layer.number, layer=layer.model)
        for number, chunk in enumerate(rank.chunks)
        for layer in chunk.layers
    )


def keep_all(slots: Sequence[LayerSlot], modes: Mapping[str, Sequence[Mode]]) -> State:
    """Return the state in which every layer keeps everything."""
    return tuple(_keep(modes[slot.layer.kind][0]) for slot in slots)


def free_most(slots: Sequence[LayerSlot], modes: Mapping[str, Sequence[Mode]]) -> State:
    """Return the state in which every layer keeps the least that it can, and of ways to do so moves and runs again least."""
    least = {}
    for kind, of_kind in modes.items():
        whole = [
            Configuration(mode=mode, chosen=tuple(min(part, key=_list_burdens) for part in mode.parts)) for mode in of_kind
        ]
        least[kind] = min(whole, key=lambda one: (one.kept_bytes, one.recompute_s))
    return tuple(least[slot.layer.kind] for slot in slots)


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
    state: list[Configuration] = []
    for slot, following in zip(slots, (*slots[1:], None), strict=True):
        last = result.chunks[slot.chunk].last
        is_last = following is None or following.chunk != slot.chunk
        state.append(last if is_last and last is not None else next(waiting[slot.chunk, slot.layer.kind]))
    return tuple(state)


def make_plan(placed: Iterable[tuple[Sequence[LayerSlot], State]]) -> OffloadPlan:
    """Return the plan of several ranks: the rows of whatever is not kept.

    Args:
        placed: Of each rank its layers, and what they do.
    """
    actions: dict[Site, Action] = {}
    for slots, state in placed:
        for slot, configuration in zip(slots, state, strict=True):
            for tag, action in configuration.actions:
                actions[Site(chunk=slot.chunk, layer=slot.number, tag=tag)] = action
    return OffloadPlan(actions=actions)


def read_plan(
    plan: OffloadPlan, slots: Sequence[LayerSlot], modes: Mapping[str, Sequence[Mode]], *, min_offloaded_numel: int
) -> State:
    """Return what `plan` says of the layers of a rank."""
    return tuple(
        find_configuration(
            slot.layer,
            modes[slot.layer.kind],
            plan.list_layer(slot.chunk, slot.number),
            min_offloaded_numel=min_offloaded_numel,
        )
        for slot in slots
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that a plan does in all layers of a kind, as a row of its table says."""

    kind: str
    """Of layer."""
    tag: str
    """Tag or unit."""
    action: Action
    """What is done."""


def list_rows(state: State, slots: Sequence[LayerSlot]) -> list[Row]:
    """Return what `state` does, in the order of forward."""
    rows = (
        Row(kind=slot.layer.kind, tag=tag, action=action)
        for slot, configuration in zip(slots, state, strict=True)
        for tag, action in configuration.actions
    )
    return list(dict.fromkeys(rows))


def drop_row(
    state: State, slots: Sequence[LayerSlot], modes: Mapping[str, Sequence[Mode]], row: Row, *, min_offloaded_numel: int
) -> State | None:
    """Return `state` without `row` and what needs it, or None where the rest cannot be done without it."""

    def drop(slot: LayerSlot, configuration: Configuration) -> Configuration:
        if slot.layer.kind != row.kind or (row.tag, row.action) not in configuration.actions:
            return configuration
        rest = {tag: action for tag, action in configuration.actions if tag != row.tag and row.tag not in list_needs(tag)}
        return find_configuration(slot.layer, modes[row.kind], rest, min_offloaded_numel=min_offloaded_numel)

    try:
        return tuple(drop(slot, configuration) for slot, configuration in zip(slots, state, strict=True))
    except PlanError:
        return None


def _keep(mode: Mode) -> Configuration:
    return Configuration(mode=mode, chosen=tuple(part[0] for part in mode.parts))


def _list_burdens(choice: Choice) -> tuple[float, ...]:
    return (choice.kept_bytes, choice.recompute_s, choice.moved_bytes)


def _spread(counts: Sequence[tuple[Configuration, int]], order: Order) -> Iterator[Configuration]:
    """Return what the layers of one kind do, all but the last of the chunk, in the order of forward."""
    found = [configuration for configuration, layers in counts for _ in range(layers)]
    found.sort(key=lambda one: (one.kept_bytes, -one.moved_bytes))
    if order is Order.FIRST:
        return iter(found)
    places = sorted(range(len(found)), key=lambda place: (place * _GOLDEN) % 1.0)
    return iter([one for _, one in sorted(zip(places, found, strict=True), key=lambda pair: pair[0])])


_GOLDEN = 0.618033988749895
"""Its multiples, without their whole part, lie as evenly between 0 and 1 as those of any number."""
