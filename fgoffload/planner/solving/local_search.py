"""Local search: draws random changes to a rank's treatments, simulates the most promising ones, and takes better ones.

A walk starts at one of the best known states. Each step draws some changes: another treatment for one layer, for all layers
with the same treatment, or for a run of layers; or two layers swap. Their results are estimated from bytes and recompute, and
the most promising change is simulated. A better state is taken, and now and then a slightly worse one (simulated annealing).
Bytes above the budget have a price, another one in each walk, instead of being forbidden: near the least budget the best plans
lie behind plans that do not fit.
"""

import collections
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.solving.peak_times import count_backwards, list_peak_times
from fgoffload.planner.solving.states import LayerSlot, State, list_slots, make_key
from fgoffload.planner.solving.treatments import Treatment, list_neighbours

_STEPS = 100
"""Steps of one walk."""

_DRAWN = 8
"""Drawn changes for each simulated one."""

_BLIND = 0.3
"""Probability that a change is simulated whatever its estimate: estimates ignore copies that wait for each other."""

_TWICE = 0.3
"""Probability that two changes are combined."""

_NEAR = 0.3
"""Probability that a changed layer differs in one tag alone."""

_STARTS = 6
"""Number of best states that walks start from: from the best one alone they mostly return to it."""

_WARMTH = 0.003
"""Temperature at the start of a walk, as a part of the step; it falls to 0."""

_IDLE_WALKS = 3
"""Consecutive walks without a new state after which the search ends."""

_LEAST_PRICE, _MOST_PRICE = 3.0, 120.0
"""Prices of a byte above the budget, in seconds of all layers per bytes of all layers: recompute of whole layers costs 1, and
the last bytes that can be freed a hundred times as much."""

_Thing = TypeVar("_Thing")


class Verdict(NamedTuple):
    """Simulated cost of a state."""

    step_s: float  # seconds of the step
    peak_bytes: int  # peak device bytes
    loss_window_bytes: int  # most bytes in flight to the host at the start of a loss


Known = dict[object, tuple[State, Verdict]]
"""Simulated costs by `make_key` of the state."""


class LocalSearch:
    """Walks over the states of one rank.

    Args:
        rank: The rank.
        treatments: Treatments of each kind of its layers.
        judge: Simulates a state and adds it to `known`.
        known: Simulated states, from which walks start.
        kept: Costs of keeping everything.
    """

    def __init__(
        self,
        rank: RankModel,
        treatments: Mapping[str, Sequence[Treatment]],
        *,
        judge: Callable[[State], Verdict],
        known: Known,
        kept: Verdict,
    ) -> None:
        self._slots = list_slots(rank)
        self._treatments = treatments
        self._judge = judge
        self._known = known
        self._kept = kept
        self._min_offloaded_numel = rank.min_offloaded_numel
        self._random = random.Random(0)
        self._microbatches = [count_backwards(rank.passes, chunk=slot.chunk) for slot in self._slots]
        self._in_flight = _count_in_flight(rank, self._slots)
        full_s = sum(slot.layer.forward_s * count for slot, count in zip(self._slots, self._microbatches, strict=True))
        full_bytes = sum(slot.layer.saved_bytes * count for slot, count in zip(self._slots, self._in_flight, strict=True))
        self._full_s_per_byte = full_s / max(full_bytes, 1)
        self._alike: dict[str, list[int]] = collections.defaultdict(list)
        for place, slot in enumerate(self._slots):
            self._alike[slot.layer.kind].append(place)

    def run(self, budget_bytes: int, *, simulations: int) -> None:
        """Walk until `count` more states are known, or walks find almost nothing new."""
        most, idle = len(self._known) + simulations, 0
        while len(self._known) < most and idle < _IDLE_WALKS:
            before = len(self._known)
            price = self._full_s_per_byte * _LEAST_PRICE * (_MOST_PRICE / _LEAST_PRICE) ** self._random.random()
            self._walk(budget_bytes, price, most)
            # With few possible plans, walks soon know all of them.
            idle = 0 if len(self._known) >= before + _STEPS // 10 else idle + 1

    def _walk(self, budget_bytes: int, price: float, most: int) -> None:
        def cost(verdict: Verdict) -> float:
            return verdict.step_s + price * max(verdict.peak_bytes - budget_bytes, 0)

        best = sorted(self._known.values(), key=lambda pair: cost(pair[1]))[:_STARTS]
        # Squared, so that better states are drawn more often.
        state, verdict = best[int(self._random.random() ** 2 * len(best))]
        for number in range(_STEPS):
            if len(self._known) >= most:
                return
            following = self._draw(state, verdict, budget_bytes, price)
            if following is None:
                continue
            other = self._judge(following)
            warmth = _WARMTH * verdict.step_s * (1 - number / _STEPS)
            worse_s = cost(other) - cost(verdict)
            if worse_s <= 0 or self._random.random() < math.exp(-worse_s / warmth):
                state, verdict = following, other

    def _draw(self, state: State, verdict: Verdict, budget_bytes: int, price: float) -> State | None:
        """Draw some states and return the most promising one, or None if all of them are known."""
        s_per_byte = self._find_copy_price(state, verdict)
        is_blind = self._random.random() < _BLIND
        promised = []
        for number in range(1 if is_blind else _DRAWN):
            following = self._change(state)
            if self._random.random() < _TWICE:
                following = self._change(following)
            longer_s, more_bytes = self._estimate(state, following, s_per_byte)
            above_s = price * max(verdict.peak_bytes + more_bytes - budget_bytes, 0)
            promised.append((longer_s + above_s, number, following))
        for _, _, following in sorted(promised, key=lambda one: one[:2]):
            if make_key(following) not in self._known:
                return following
        return None

    def _find_copy_price(self, state: State, verdict: Verdict) -> float:
        """Return the seconds that an offloaded byte adds to the step, from `state` against keeping everything."""
        pairs = list(zip(state, self._microbatches, strict=True))
        moved_bytes = sum(one.moved_bytes * count for one, count in pairs)
        recompute_s = sum(one.recompute_s * count for one, count in pairs)
        longer_s = verdict.step_s - self._kept.step_s - recompute_s
        return max(longer_s, 0.0) / moved_bytes if moved_bytes else 0.0

    def _estimate(self, state: State, following: State, s_per_byte: float) -> tuple[float, float]:
        """Estimate the change of the step and of the peak."""
        longer_s = more_bytes = 0.0
        for place, (before, after) in enumerate(zip(state, following, strict=True)):
            if before is not after:
                copied_s = (after.moved_bytes - before.moved_bytes) * s_per_byte
                longer_s += (after.recompute_s - before.recompute_s + copied_s) * self._microbatches[place]
                more_bytes += (after.kept_bytes - before.kept_bytes) * self._in_flight[place]
        return longer_s, more_bytes

    def _change(self, state: State) -> State:
        place, kind = self._pick(range(len(state))), self._random.random()
        alike = self._alike[self._slots[place].layer.kind]
        if kind < 0.65:
            same = [other for other in alike if state[other].actions == state[place].actions]
            return self._treat(state, same if self._random.random() < 0.3 else [place])
        layers, other = list(state), self._pick(alike)
        if kind < 0.8:  # the layers between get this one's treatment
            for between in alike:
                if min(place, other) <= between <= max(place, other):
                    layers[between] = state[place]
        else:
            layers[place], layers[other] = layers[other], layers[place]
        return tuple(layers)

    def _treat(self, state: State, places: Sequence[int]) -> State:
        layer = self._slots[places[0]].layer
        chosen = self._pick(self._treatments[layer.kind])
        if self._random.random() < _NEAR:
            near = list_neighbours(layer, state[places[0]].actions, min_offloaded_numel=self._min_offloaded_numel)
            chosen = self._pick(near or [chosen])
        return tuple(chosen if place in places else one for place, one in enumerate(state))

    def _pick(self, things: Sequence[_Thing]) -> _Thing:
        return things[int(self._random.random() * len(things))]


def _count_in_flight(rank: RankModel, slots: Sequence[LayerSlot]) -> list[int]:
    """Return the microbatches in flight of each layer when the layers together keep most."""
    sizes = [sum(layer.model.saved_bytes for layer in chunk.layers) for chunk in rank.chunks]
    vectors = [time.in_flight for time in list_peak_times(rank.passes, len(rank.chunks))]
    most = max(vectors, key=lambda vector: sum(count * size for count, size in zip(vector, sizes, strict=True)))
    return [most[slot.chunk] for slot in slots]
