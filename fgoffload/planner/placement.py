"""Which layers make the choices that a program counted, and the plan of a rank that comes of it.

The program says how many layers of a kind do what; where they lie is chosen here. What leaves first has the longest way back,
so in forward order whoever keeps least comes first. But copies wait for each other, and may run only a window behind forward
and a prefetch ahead of backward: where that binds, layers that share the load are better. The simulator says which.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.choices import Actions, Choice, Mode, join_actions
from fgoffload.planner.layer_model import LayerModel
from fgoffload.planner.program import ModeCount, ProgramResult
from fgoffload.planner.rank_model import RankModel


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What one layer does."""

    mode: Mode
    """Which units that cover several parts run again."""
    chosen: tuple[Choice, ...]
    """What each part of the mode does beyond that."""

    @property
    def actions(self) -> Actions:
        """Return the actions of the layer."""
        return join_actions((self.mode.base, *self.chosen))

    @property
    def kept_bytes(self) -> int:
        """Return what more than in a layer that keeps all stays on the device: mostly below 0."""
        return self.mode.base.kept_bytes + sum(choice.kept_bytes for choice in self.chosen)

    @property
    def moved_bytes(self) -> int:
        """Return what leaves of a microbatch."""
        return self.mode.base.moved_bytes + sum(choice.moved_bytes for choice in self.chosen)

    @property
    def recompute_s(self) -> float:
        """Return the seconds that backward takes longer."""
        return self.mode.base.recompute_s + sum(choice.recompute_s for choice in self.chosen)

    @property
    def returned_bytes(self) -> int:
        """Return the most that is on the device again when a unit has run again."""
        return max((choice.returned_bytes for choice in (self.mode.base, *self.chosen)), default=0)


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
    waiting = {key: _list_configurations(counts, order) for key, counts in result.counts.items()}
    return tuple(next(waiting[slot.chunk, slot.layer.kind]) for slot in slots)


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


def _keep(mode: Mode) -> Configuration:
    return Configuration(mode=mode, chosen=tuple(part[0] for part in mode.parts))


def _list_burdens(choice: Choice) -> tuple[float, ...]:
    return (choice.kept_bytes, choice.recompute_s, choice.moved_bytes)


def _list_configurations(counts: Sequence[ModeCount], order: Order) -> Iterator[Configuration]:
    """Return what the layers of one kind and chunk do, in the order of forward."""
    found = [configuration for count in counts for configuration in _combine_parts(count, order)]
    if order is Order.FIRST:
        return iter(sorted(found, key=lambda one: (one.kept_bytes, -one.moved_bytes)))
    # Whole modes differ most, so layers of each lie apart from each other.
    found.sort(key=lambda one: -one.moved_bytes)
    places = sorted(range(len(found)), key=lambda place: (place * _GOLDEN) % 1.0)
    return iter([one for _, one in sorted(zip(places, found, strict=True), key=lambda pair: pair[0])])


_GOLDEN = 0.618033988749895
"""Its multiples, without their whole part, lie as evenly between 0 and 1 as those of any number."""


def _combine_parts(count: ModeCount, order: Order) -> list[Configuration]:
    """Return configurations of the layers of one mode: the choices of its parts, put together."""
    rows: list[list[Choice]] = [[] for _ in range(count.layers)]
    loads = [0] * count.layers
    for choices in count.parts:
        dealt = sorted((choice for choice, layers in choices for _ in range(layers)), key=lambda one: -one.moved_bytes)
        places = range(count.layers)
        # Most to whom has least so far, or all of it to the first.
        order_of_layers = sorted(places, key=lambda place: loads[place]) if order is Order.EVEN else list(places)
        for place, choice in zip(order_of_layers, dealt, strict=True):
            rows[place].append(choice)
            loads[place] += choice.moved_bytes
    return [Configuration(mode=count.mode, chosen=tuple(row)) for row in rows]
