"""Small changes to what the layers of a rank do, the most promising first.

One part of one layer chooses otherwise, or a whole layer does; two layers of a kind change places; or two changes at once. What
each would do is estimated here, from its bytes and its recompute; whether it does, the simulator says.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fgoffload.planner.solving.choices import Configuration
from fgoffload.planner.solving.placement import LayerSlot, State

_TRIES = 2
"""Of one change in different layers, before other changes have their turn."""

_MOST_OF_EACH = 32
"""Changes that free memory, and as many that use it, of which pairs are made: 2016 pairs are more than are ever simulated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a byte and a second of one microbatch and layer come to in a step, by chunk."""

    in_flight: tuple[int, ...]
    """Microbatches that are there at the peak."""
    microbatches: tuple[int, ...]
    """Of a step."""
    s_per_byte: float
    """Seconds that the copies of a byte, out and back, make a step longer."""


class Change(NamedTuple):
    """One layer does something else."""

    place: int
    """Of the layer, in the order of `list_slots`."""
    part: int | None
    """The part of its mode that chooses otherwise, or None where the whole layer does."""
    configuration: Configuration
    """What it does then."""
    peak_bytes: float
    """How much higher the peak would be."""
    step_s: float
    """How much longer the step would be."""


Move = tuple[Change, ...]
"""Changes that are made at once."""


def list_changes(
    state: State, slots: Sequence[LayerSlot], ways: Mapping[str, Sequence[Configuration]], prices: Prices
) -> list[Change]:
    """Return the changes of one part of one layer, and of one layer as a whole.

    Args:
        state: What the layers do.
        slots: The layers.
        ways: What each kind of layer may do instead, as a whole.
        prices: What it would come to.
    """
    changes = []
    for place, (slot, configuration) in enumerate(zip(slots, state, strict=True)):
        found: list[tuple[int | None, Configuration]] = list(configuration.neighbours)
        near = {other.actions for _, other in found} | {configuration.actions}
        found += [(None, other) for other in ways[slot.layer.kind] if other.actions not in near]
        changes += [_make_change(place, part, slot, configuration, other, prices) for part, other in found]
    return changes


def list_swaps(state: State, slots: Sequence[LayerSlot], prices: Prices) -> Iterator[Move]:
    """Yield every change of places of two layers of a kind that do different things, near ones first."""
    pairs = itertools.combinations(range(len(slots)), 2)
    for left, right in sorted(pairs, key=lambda pair: pair[1] - pair[0]):
        if slots[left].layer.kind == slots[right].layer.kind and state[left] != state[right]:
            yield (
                _make_change(left, None, slots[left], state[left], state[right], prices),
                _make_change(right, None, slots[right], state[right], state[left], prices),
            )


def list_pairs(changes: Sequence[Change]) -> list[Move]:
    """Return pairs of changes, those first that free most for the time that they take, or gain most for what they use."""
    freeing = sorted((one for one in changes if one.peak_bytes < 0), key=_get_rate)[:_MOST_OF_EACH]
    using = sorted((one for one in changes if one.peak_bytes >= 0), key=_get_rate)[:_MOST_OF_EACH]
    return [pair for pair in itertools.combinations([*freeing, *using], 2) if _may_pair(*pair)]


def order_moves(
    state: State, slots: Sequence[LayerSlot], moves: Iterable[Move], *, above_bytes: int, doubt_bytes: float
) -> list[Move]:
    """Return those of `moves` that may better a state, the most promising first.

    The same change in another layer mostly comes to the same: each is tried in two layers that are far from each other before
    any is in more.

    Args:
        state: What the layers do.
        slots: The layers.
        moves: From `state`.
        above_bytes: How far its peak is above the budget; below 0 where it fits.
        doubt_bytes: By how much moves may exceed the budget by estimate. Infinite lets all through, slower ones too.
    """
    found = []
    for move in moves:
        peak_bytes = sum(change.peak_bytes for change in move)
        step_s = sum(change.step_s for change in move)
        if above_bytes <= 0 and peak_bytes + above_bytes <= doubt_bytes and (step_s <= 0 or math.isinf(doubt_bytes)):
            found.append((step_s, peak_bytes, move))
        elif above_bytes > 0 and (peak_bytes <= -above_bytes or math.isinf(doubt_bytes)):
            # What frees enough, the fastest first; and then the rest.
            found.append((step_s if peak_bytes <= -above_bytes else math.inf, peak_bytes, move))
    ordered = [move for _, _, move in sorted(found, key=lambda row: row[:2])]
    alike: dict[object, list[int]] = {}
    for number, move in enumerate(ordered):
        alike.setdefault(_describe(state, slots, move), []).append(number)
    turns = {number: turn // _TRIES for numbers in alike.values() for turn, number in enumerate(spread(numbers))}
    return [ordered[number] for number in sorted(turns, key=lambda number: (turns[number], number))]


def spread(numbers: Sequence[int]) -> list[int]:
    """Return `numbers` in another order: the first ones lie as far from each other as they can."""
    bits = max(len(numbers) - 1, 1).bit_length()
    places = sorted(range(len(numbers)), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
    return [numbers[place] for place in places]


def apply_move(state: State, move: Move) -> State:
    """Return `state` after the changes of `move`."""
    layers = list(state)
    for change in move:
        if change.part is None:
            layers[change.place] = change.configuration
            continue
        # What another change did to another part of the layer stays.
        chosen = list(layers[change.place].chosen)
        chosen[change.part] = change.configuration.chosen[change.part]
        layers[change.place] = Configuration(mode=change.configuration.mode, chosen=tuple(chosen))
    return tuple(layers)


def _describe(state: State, slots: Sequence[LayerSlot], move: Move) -> object:
    """Return what `move` has in common with the same in other layers."""
    return frozenset((slots[one.place].layer.kind, state[one.place].actions, one.configuration.actions) for one in move)


def _make_change(
    place: int, part: int | None, slot: LayerSlot, before: Configuration, after: Configuration, prices: Prices
) -> Change:
    microbatches = prices.microbatches[slot.chunk]
    recompute_s = after.recompute_s - before.recompute_s
    copied_s = (after.moved_bytes - before.moved_bytes) * prices.s_per_byte
    returned_bytes = after.returned_bytes - before.returned_bytes
    return Change(
        place=place,
        part=part,
        configuration=after,
        peak_bytes=(after.kept_bytes - before.kept_bytes) * prices.in_flight[slot.chunk] + returned_bytes,
        step_s=(recompute_s + copied_s) * microbatches,
    )


def _get_rate(change: Change) -> float:
    """Return seconds for each byte that a change frees, or, below 0, that it gains for each byte that it uses."""
    return change.step_s / max(abs(change.peak_bytes), 1.0)


def _may_pair(left: Change, right: Change) -> bool:
    return left.place != right.place or (left.part is not None and right.part is not None and left.part != right.part)
