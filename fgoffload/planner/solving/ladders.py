"""Plans by rule of thumb, from which the search begins beside what the program says.

The first layers of each chunk free more, the others less: what leaves first has the longest way back, and the last layers are
asked for first. A rung is how many layers free more. One rung higher mostly takes less memory, so that the lowest rung that
fits is found by halving. The program knows more, but on one stage, where what hides depends on the place of each layer, rules
of thumb are at times better; the simulator says which.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from fgoffload.planner.solving.choices import Configuration, Mode
from fgoffload.planner.solving.placement import LayerSlot, State, keep_all
from fgoffload.planner.solving.ways import list_ways, make_wide

_KEEPING, _CHEAP, _MOVING = range(3)
"""Where in `list_ways` the first three are."""


def list_ladders(slots: Sequence[LayerSlot], modes: Mapping[str, Sequence[Mode]]) -> Iterator[Callable[[int], State]]:
    """Yield ladders: functions from a rung, 0 to as many as the largest chunk has layers, to what the layers do.

    Args:
        slots: The layers of a rank.
        modes: What each kind may choose from.
    """
    ways = {slot.layer.kind: list_ways(modes[slot.layer.kind]) for slot in slots}
    most = max((len(of_kind) for of_kind in ways.values()), default=0)
    for lower in (_KEEPING, _CHEAP):
        for upper in range(lower + 1, most):
            if _frees_more(ways, upper, lower):
                yield _make_ladder(slots, ways, (upper, lower))
    # Layers that run widely again first, then layers that move, then layers that only run again what is cheap.
    for upper in range(_MOVING + 1, most):
        if _frees_more(ways, upper, _MOVING):
            for wide in range(1, count_rungs(slots)):
                yield _make_ladder(slots, ways, (upper, _MOVING, _CHEAP), fixed=wide)


def list_tightened(
    state: State, slots: Sequence[LayerSlot], modes: Mapping[str, Sequence[Mode]]
) -> Iterator[Callable[[int], State]]:
    """Yield ladders from what a looser budget has: rung k is `state` with k layers of each chunk that run widely again.

    Those are the ones before the last, whose copies have the shortest way back, or the first ones. With each, the last layer
    does what `state` says, or keeps all: backward would wait for whatever it moves.

    Args:
        state: What the layers do where there is more memory.
        slots: The layers of a rank.
        modes: What each kind may choose from.
    """
    places: dict[int, list[int]] = {}
    for place, slot in enumerate(slots):
        places.setdefault(slot.chunk, []).append(place)
    most = max((len(modes[slot.layer.kind]) for slot in slots), default=0)
    for number in range(most - 1, 0, -1):
        wide = {kind: make_wide(of_kind[min(number, len(of_kind) - 1)]) for kind, of_kind in modes.items()}
        for base in dict.fromkeys((state, _keep_last(state, slots, modes))):
            yield _make_tightened(base, slots, wide, [[*reversed(own[:-1]), own[-1]] for own in places.values()])
            yield _make_tightened(base, slots, wide, list(places.values()))


def find_lowest(
    ladder: Callable[[int], State],
    rungs: int,
    fits: Callable[[State], bool],
    *,
    is_hopeless: Callable[[State], bool] = lambda _: False,
) -> State | None:
    """Return the state of the lowest rung that fits, or None where the highest does not.

    Args:
        ladder: From a rung to what the layers do.
        rungs: The highest.
        fits: Asked of few rungs: ever longer steps upwards, and then by halving.
        is_hopeless: Whether rungs above one that does not fit need not be looked at.
    """
    low, high = 0, min(1, rungs)
    while not fits(ladder(high)):
        if high == rungs or is_hopeless(ladder(high)):
            return None
        low, high = high + 1, min(2 * high, rungs)
    while low < high:
        middle = (low + high) // 2
        if fits(ladder(middle)):
            high = middle
        else:
            low = middle + 1
    return ladder(high)


def count_rungs(slots: Sequence[LayerSlot]) -> int:
    """Return the layers of the largest chunk."""
    counts: dict[int, int] = {}
    for slot in slots:
        counts[slot.chunk] = counts.get(slot.chunk, 0) + 1
    return max(counts.values(), default=0)


def _frees_more(ways: Mapping[str, Sequence[Configuration]], upper: int, lower: int) -> bool:
    """Return whether each kind of layer keeps no more one way than the other, and one of them less."""
    pairs = [(_find_way(of_kind, upper).kept_bytes, _find_way(of_kind, lower).kept_bytes) for of_kind in ways.values()]
    return all(one <= other for one, other in pairs) and any(one < other for one, other in pairs)


def _find_way(of_kind: Sequence[Configuration], index: int) -> Configuration:
    """Return one of a kind's ways; the last where it has fewer than others."""
    return of_kind[min(index, len(of_kind) - 1)]


def _make_ladder(
    slots: Sequence[LayerSlot], ways: Mapping[str, Sequence[Configuration]], levels: Sequence[int], *, fixed: int = 0
) -> Callable[[int], State]:
    """Return a ladder of two levels, or of three, where the first `fixed` layers of each chunk have the first level."""

    def climb(rung: int) -> State:
        state = []
        place: dict[int, int] = {}
        for slot in slots:
            index = place[slot.chunk] = place.get(slot.chunk, -1) + 1
            moving, resting = levels[-2:]
            level = levels[0] if index < fixed else moving if index < rung else resting
            state.append(_find_way(ways[slot.layer.kind], level))
        return tuple(state)

    return climb


def _make_tightened(
    state: State, slots: Sequence[LayerSlot], wide: Mapping[str, Configuration], orders: Sequence[Sequence[int]]
) -> Callable[[int], State]:
    def climb(rung: int) -> State:
        layers = list(state)
        for order in orders:
            for place in order[:rung]:
                other = wide[slots[place].layer.kind]
                if other.kept_bytes < layers[place].kept_bytes:
                    layers[place] = other
        return tuple(layers)

    return climb


def _keep_last(state: State, slots: Sequence[LayerSlot], modes: Mapping[str, Sequence[Mode]]) -> State:
    kept = keep_all(slots, modes)
    chunks = [slot.chunk for slot in slots]
    is_last = [chunk != following for chunk, following in zip(chunks, (*chunks[1:], None), strict=True)]
    return tuple(kept[place] if is_last[place] else one for place, one in enumerate(state))
