"""Random walks over what the layers of a rank do: the way to plans that no small change leads to.

Near the least budget the best plan of a rank has few kinds of layers in it, the inner ones alike, and each of them far from
what a slightly larger budget has: whole runs of layers change at once, and on the way there plans do not fit or are slow. So a
walk changes runs of layers as well as single ones, and pays for a byte above the budget instead of turning back from it. Of
several steps drawn it simulates the one that promises most, and takes it if it is better, or now and then a little worse:
simulated annealing. Each walk begins at the best of what is known at its price, wherever an earlier one found it.

    [Note: Cells of budgets]
    Walks know nothing of the budget that is asked for: only in which cell of a fixed scale it lies. So all budgets of a cell
    have the same plans to choose from, and of these a larger one has no fewer. They go to budgets of the cell below as well:
    without those a budget that begins a cell would know only plans that are above it. Two cells have walks of their own each,
    so that of two budgets on both sides of a border the larger one can be slower.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from fgoffload.planner.solving.choices import Configuration
from fgoffload.planner.solving.frontier import LayerPoints
from fgoffload.planner.solving.moves import Prices
from fgoffload.planner.solving.placement import LayerSlot, State
from fgoffload.planner.solving.verdict import Knowledge, Verdict, make_key

_STEPS = 100
"""Of one walk, then another one begins at another price."""

_IDLE_WALKS = 3
"""In a row that find next to nothing new: the last ones."""

_DRAWN = 16
"""Steps of which the most promising one is simulated. 8 came out about alike at a few budgets of one model, 1 worse."""

_BLIND = 0.2
"""How often a step is simulated whatever it promises: estimates know nothing of copies that come to wait for others."""

_UNLIKE = 6
"""Walks begin at one of so many states: from the best one alone they mostly
came back to it."""

_TWICE = 0.3
"""How often two changes are one step."""

_WARMTH = 0.003
"""How much worse than before a plan may be at the beginning of a walk, as a part of the step; at its end, not at all."""

_LEAST_PRICE, _MOST_PRICE = 3.0, 120.0
"""Of a byte above the budget, in seconds that all layers take for all their bytes: what runs again costs 1 where all of a
layer does, and the last bytes that can be freed a hundred times as much."""


_Thing = TypeVar("_Thing")


class Walks:
    """Random walks of one rank, which know of each other.

    Args:
        slots: The layers of the rank.
        points: What is worth having of what each kind of layer may do.
        judge: Simulates a state, with the most on the device at each stretch.
        make_prices: What bytes and seconds come to, from a state on.
        full_s_per_byte: What running all again takes for each byte that it frees.
        is_over: Whether the time for plans is up. Asked before each walk.
    """

    def __init__(
        self,
        slots: Sequence[LayerSlot],
        points: Mapping[str, LayerPoints],
        *,
        judge: Callable[[State], Verdict],
        make_prices: Callable[[State, Verdict], Prices],
        full_s_per_byte: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.known: Knowledge = {}
        """What was simulated, by actions."""
        self._slots = slots
        self._judge = judge
        self._make_prices = make_prices
        self._full_s_per_byte = full_s_per_byte
        self._is_over = is_over
        self._steps = Steps(slots, {kind: [point.configuration for point in one.every] for kind, one in points.items()})
        self._peaks = PeakEstimate(slots, points)

    def run(self, starts: Iterable[State], *, low_bytes: int, high_bytes: int, simulations: int) -> None:
        """Walk towards budgets of a cell until so many states are known.

        Args:
            starts: What is known at the beginning.
            low_bytes: The least budget of the cell.
            high_bytes: Where the next one begins.
            simulations: Of the walks, with those of `starts`.
        """
        for state in starts:
            self._look(state)
        idle = 0
        while len(self.known) < simulations and idle < _IDLE_WALKS and not self._is_over():
            before = len(self.known)
            budget_bytes = low_bytes + round(self._steps.draw() * (high_bytes - low_bytes))
            price = self._full_s_per_byte * _LEAST_PRICE * (_MOST_PRICE / _LEAST_PRICE) ** self._steps.draw()
            self._walk(budget_bytes, price, simulations)
            # Where there are few plans walks know all that they come to.
            idle = 0 if len(self.known) >= before + _STEPS // 10 else idle + 1

    def _walk(self, budget_bytes: int, price: float, simulations: int) -> None:
        def cost(verdict: Verdict) -> float:
            return verdict.step_s + price * max(verdict.peak_bytes - budget_bytes, 0)

        state, verdict = self._pick_start(cost)
        for number in range(_STEPS):
            if len(self.known) >= simulations:
                return
            following = self._draw(state, verdict, budget_bytes, price)
            if following is None:
                continue
            other = self._look(following)
            warmth = _WARMTH * verdict.step_s * (1 - number / _STEPS)
            if cost(other) <= cost(verdict) or self._steps.draw() < math.exp((cost(verdict) - cost(other)) / warmth):
                state, verdict = following, other

    def _pick_start(self, cost: Callable[[Verdict], float]) -> tuple[State, Verdict]:
        """Return one of the best states known that are unlike each other: those whose layers have other modes."""
        unlike: dict[object, tuple[State, Verdict]] = {}
        for state, verdict in sorted(self.known.values(), key=lambda pair: cost(pair[1])):
            unlike.setdefault(tuple(one.mode.base.actions for one in state), (state, verdict))
            if len(unlike) == _UNLIKE:
                break
        # The square: the better ones more often.
        return list(unlike.values())[int(self._steps.draw() ** 2 * len(unlike))]

    def _draw(self, state: State, verdict: Verdict, budget_bytes: int, price: float) -> State | None:
        """Return where the most promising of some steps leads that were drawn, or None where all lead to what is known."""
        prices, peaks = self._make_prices(state, verdict), self._peaks.list_peaks(verdict)
        is_blind = self._steps.draw() < _BLIND
        drawn = [self._steps.take(state) for _ in range(1 if is_blind else _DRAWN)]
        promised = []
        for number, following in enumerate(drawn):
            peak_bytes = self._peaks.count(state, following, peaks, prices.in_flight)
            above_s = price * max(peak_bytes - budget_bytes, 0)
            promised.append((self._count_longer_s(state, following, prices) + above_s, number))
        for _, number in sorted(promised):
            if drawn[number] != state and (is_blind or make_key(drawn[number]) not in self.known):
                return drawn[number]
        return None

    def _count_longer_s(self, state: State, following: State, prices: Prices) -> float:
        """Return how much longer the step would be by estimate."""
        longer_s = 0.0
        for slot, before, after in zip(self._slots, state, following, strict=True):
            if before is not after:
                copied_s = (after.moved_bytes - before.moved_bytes) * prices.s_per_byte
                longer_s += (after.recompute_s - before.recompute_s + copied_s) * prices.microbatches[slot.chunk]
        return longer_s

    def _look(self, state: State) -> Verdict:
        key = make_key(state)
        if key not in self.known:
            self.known[key] = (state, self._judge(state))
        return self.known[key][1]


class Peak(NamedTuple):
    """The most on the device at the stretches of a layer."""

    is_forward: bool
    """Or in its backward."""
    chunk: int
    """Of the pass."""
    place: int
    """Of the layer; behind all of them where the stretches are in none, as the loss."""
    size_bytes: int
    """The most."""


class PeakEstimate:
    """What the peak of a state would be by those of another one at each stretch.

    What a layer keeps is there from its forward to its backward, so that where the peak is decides which layers lower it. When
    one was lowered enough another is the highest.

    Args:
        slots: The layers.
        points: What is worth having of what each kind of layer may do.
    """

    def __init__(self, slots: Sequence[LayerSlot], points: Mapping[str, LayerPoints]) -> None:
        self._slots = slots
        self._places = {(slot.chunk, f"layers.{slot.number}"): place for place, slot in enumerate(slots)}
        self._extra_bytes = {
            (kind, point.configuration.actions): point.last.extra_bytes for kind, one in points.items() for point in one.every
        }

    def list_peaks(self, verdict: Verdict) -> list[Peak]:
        """Return the most at the stretches of each layer, and at those behind all layers."""
        most: dict[tuple[bool, int, int], int] = {}
        for (is_forward, chunk, label), size_bytes in (verdict.peaks or {}).items():
            place = self._places.get((chunk, ".".join(label.split(".")[:2])), len(self._slots))
            most[is_forward, chunk, place] = max(most.get((is_forward, chunk, place), 0), size_bytes)
        return [Peak(*where, size_bytes) for where, size_bytes in most.items()]

    def count(self, state: State, following: State, peaks: Sequence[Peak], in_flight: Sequence[int]) -> int:
        """Return the peak of `following`.

        Args:
            state: What was simulated.
            following: What may be.
            peaks: Of `state`.
            in_flight: Microbatches that are there at the peak, by chunk.
        """
        changed = [
            (
                place,
                self._slots[place].chunk,
                following[place].kept_bytes - state[place].kept_bytes,
                self._count_own_bytes(place, state[place], following[place]),
            )
            for place, (one, other) in enumerate(zip(state, following, strict=True))
            if one is not other
        ]
        # Of the microbatches that are not in a pass all is there.
        others_bytes = sum(more_bytes * (in_flight[chunk] - 1) for _, chunk, more_bytes, _ in changed)
        most = 0
        for peak in peaks:
            total = peak.size_bytes + others_bytes
            for place, chunk, more_bytes, own_bytes in changed:
                if place < peak.place or chunk != peak.chunk:
                    total += more_bytes
                elif place == peak.place and not peak.is_forward:
                    total += own_bytes
            most = max(most, total)
        return most

    def _count_own_bytes(self, place: int, before: Configuration, after: Configuration) -> int:
        """Return what more the backward of a layer would have in it, with what is back or runs again."""
        kind = self._slots[place].layer.kind
        extra = [self._extra_bytes.get((kind, one.actions)) for one in (before, after)]
        more_bytes = after.kept_bytes - before.kept_bytes
        if extra[0] is None or extra[1] is None:
            return more_bytes + after.returned_bytes - before.returned_bytes
        return more_bytes + extra[1] - extra[0]


class Steps:
    """Random changes to what the layers of a rank do. The same ones whenever they are drawn.

    Args:
        slots: The layers.
        ways: What each kind of layer may do as a whole.
    """

    def __init__(self, slots: Sequence[LayerSlot], ways: Mapping[str, Sequence[Configuration]]) -> None:
        self._slots = slots
        self._ways = ways
        # Of what `random` has only this one is promised to be the same in all versions of Python.
        self.draw = random.Random(0).random
        """Returns a number from 0 to below 1."""

    def take(self, state: State) -> State:
        """Return `state` after one or two random changes."""
        changed = self._change(state)
        return self._change(changed) if self.draw() < _TWICE else changed

    def _change(self, state: State) -> State:
        place = self._pick(range(len(state)))
        kind = self.draw()
        if kind < 0.3:
            return self._choose_part(state, [place])
        if kind < 0.45:
            return self._choose_part(state, self._list_kind(place))
        if kind < 0.6:
            return self._choose_way(state, [place])
        if kind < 0.85:
            alike = [other for other in self._list_kind(place) if state[other].actions == state[place].actions]
            return self._choose_way(state, alike)
        if kind < 0.95:
            return self._spread_way(state, place)
        return self._swap(state, place)

    def _choose_part(self, state: State, places: Sequence[int]) -> State:
        """Let one part of the first of `places` choose otherwise, and the same part of those others that have it."""
        mode = state[places[0]].mode
        if not mode.parts:
            return state
        part = self._pick(range(len(mode.parts)))
        choice = self._pick(mode.parts[part])
        layers = list(state)
        for place in places:
            own = layers[place]
            if own.mode.base.actions == mode.base.actions and len(own.chosen) == len(mode.parts):
                chosen = (*own.chosen[:part], choice, *own.chosen[part + 1 :])
                layers[place] = Configuration(mode=own.mode, chosen=chosen)
        return tuple(layers)

    def _choose_way(self, state: State, places: Sequence[int]) -> State:
        way = self._pick(self._ways[self._slots[places[0]].layer.kind])
        layers = list(state)
        for place in places:
            layers[place] = way
        return tuple(layers)

    def _spread_way(self, state: State, place: int) -> State:
        """Let the layers from `place` to another one do what the one there does."""
        end = self._pick(range(len(state)))
        layers = list(state)
        for other in self._list_kind(place):
            if min(place, end) <= other <= max(place, end):
                layers[other] = state[place]
        return tuple(layers)

    def _swap(self, state: State, place: int) -> State:
        other = self._pick(self._list_kind(place))
        layers = list(state)
        layers[place], layers[other] = layers[other], layers[place]
        return tuple(layers)

    def _list_kind(self, place: int) -> list[int]:
        """Return the layers that are of the kind of the one at `place`: that one first."""
        kind = self._slots[place].layer.kind
        return [place, *(other for other, slot in enumerate(self._slots) if slot.layer.kind == kind and other != place)]

    def _pick(self, things: Sequence[_Thing]) -> _Thing:
        return things[int(self.draw() * len(things))]
