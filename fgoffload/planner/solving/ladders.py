"""Plans by rule of thumb, from which the search begins beside what the program says.

The first layers of each chunk free more, the others less: what leaves first has the longest way back, and the last layers are
asked for first. A rung is how many layers free more. One rung higher mostly takes less memory, so that the lowest rung that
fits is found by halving. The program knows more, but on one stage, where what hides depends on the place of each layer, rules
of thumb are at times better; the simulator says which.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from fgoffload.planner.solving.choices import Choice, Configuration, Mode
from fgoffload.planner.solving.placement import LayerSlot, State

_CHEAP_S_PER_BYTE = 2e-12
"""Running again what takes no longer than this for each byte that it frees is done in all layers: a copy takes ten times as
long, 20e-12 each way at 50 GB/s."""


_KEEPING, _CHEAP, _MOVING = range(3)
"""Where in `_list_ways` the first three are."""


def list_ladders(slots: Sequence[LayerSlot], modes: Mapping[str, Sequence[Mode]]) -> Iterator[Callable[[int], State]]:
    """Yield ladders: functions from a rung, 0 to as many as the largest chunk has layers, to what the layers do.

    Args:
        slots: The layers of a rank.
        modes: What each kind may choose from.
    """
    ways = {slot.layer.kind: _list_ways(modes[slot.layer.kind]) for slot in slots}
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


def find_lowest(ladder: Callable[[int], State], rungs: int, fits: Callable[[State], bool]) -> State | None:
    """Return the state of the lowest rung that fits, or None where the highest does not."""
    if not fits(ladder(rungs)):
        return None
    low, high = 0, rungs
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


def _list_ways(modes: Sequence[Mode]) -> list[Configuration]:
    """Return what a kind of layer may do, by rule of thumb: keep all; run cheap things again; move all beside; and wider ways.

    Then each part alone moves, and each wider mode with and without what moves beside it.
    """
    plain = modes[0]
    cheap = tuple(_pick_cheap(part) for part in plain.parts)
    most = tuple(_pick_most(part) for part in plain.parts)
    ways = [
        Configuration(mode=plain, chosen=tuple(part[0] for part in plain.parts)),
        Configuration(mode=plain, chosen=cheap),
        Configuration(mode=plain, chosen=most),
    ]
    for place, choice in enumerate(most):
        if choice != cheap[place]:
            ways.append(Configuration(mode=plain, chosen=(*cheap[:place], choice, *cheap[place + 1 :])))
    for mode in modes[1:]:
        ways.append(Configuration(mode=mode, chosen=tuple(_pick_cheap(part) for part in mode.parts)))
        ways.append(Configuration(mode=mode, chosen=tuple(_pick_most(part) for part in mode.parts)))
    return ways


def _pick_cheap(part: Sequence[Choice]) -> Choice:
    """Return what frees most of a part without a copy, and without a recompute that takes long for what it frees."""
    return min((choice for choice in part if not choice.moved_bytes and _is_cheap(choice)), key=_list_burdens)


def _pick_most(part: Sequence[Choice]) -> Choice:
    """Return what frees most of a part, copies or not, without a recompute that takes long for what it frees."""
    return min((choice for choice in part if _is_cheap(choice)), key=_list_burdens)


def _is_cheap(choice: Choice) -> bool:
    return choice.recompute_s <= _CHEAP_S_PER_BYTE * max(-choice.kept_bytes, 0)


def _list_burdens(choice: Choice) -> tuple[float, ...]:
    return (choice.kept_bytes, choice.recompute_s, choice.moved_bytes)
