"""Searches for the best plan for one rank, without waits for its neighbors. The simulator evaluates every state.

A sweep raises the price of device memory step by step until the rank fits its budget. How much of a copy is hidden depends on
the rest of the plan, so we sweep at two prices per offloaded byte. `local_search` then improves the results.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import LateCosts, RankModel
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.states import LayerSlot, State, find_fullest, list_slots, make_key, make_plan, shorten
from fgoffload.planner.solving.treatments import KEEP, Treatment, list_treatments

_COPY_PRICES = (0.03, 0.4)  # copy prices that sweeps try: fractions of the copy time to the host that count as step time
_SPREADS = ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1))  # strides and offsets of layers with large offloads

_NEARLY_FREE = 1.01  # a rank needs no search if its microbatches take at most this multiple of the slowest rank's baseline

Base = Mapping[int, Treatment]  # treatments keyed by layer index


class RankCost(NamedTuple):
    """Simulated cost of a state."""

    step_s: float  # seconds of the step
    peak_bytes: int  # peak device bytes
    loss_window_bytes: int  # maximum bytes in flight to the host at the start of a loss


class RankSearch:
    """Searches for the best state of one rank. `loss_window_bytes` is the same setting as in `OffloadPlan`."""

    def __init__(self, rank: RankModel, *, loss_window_bytes: int | None) -> None:
        self.rank = shorten(rank)
        self.slots = list_slots(self.rank)
        self.known: dict[object, tuple[State, RankCost]] = {}  # simulated states with their costs, keyed by `make_key`
        self.loss_window_bytes = loss_window_bytes
        self.layer_passes = sum(len(self.rank.chunks[one.chunk].layers) for one in self.rank.passes)  # of one simulation
        self._microbatches = 1 + max(one.microbatch for one in self.rank.passes)
        self._swept: set[int] = set()  # budgets of earlier sweeps, and budgets that need none

    @functools.cached_property
    def treatments(self) -> Mapping[LayerModel, Sequence[Treatment]]:
        """Treatments of each kind of layer."""
        # A rank with few layers needs finer steps per layer to use its whole budget.
        parts, numel = max(20, 80 // max(len(self.slots), 1)), self.rank.min_offloaded_numel
        return {
            layer: list_treatments(layer, min_offloaded_numel=numel, late=self.rank.late, parts=parts)
            for layer in dict.fromkeys(slot.layer for slot in self.slots)
        }

    @property
    def kept(self) -> RankCost:
        """Simulated cost of the baseline."""
        return self.evaluate((KEEP,) * len(self.slots))

    def evaluate(self, state: State) -> RankCost:
        """Return the simulated cost of `state`. Each state is simulated once."""
        key = make_key(state)
        if key not in self.known:
            plan = make_plan([(self.slots, state)], loss_window_bytes=self.loss_window_bytes)
            result = simulate_rank(self.rank, plan)
            self.known[key] = (state, RankCost(result.step_s, result.peak_bytes, result.loss_window_bytes))
        return self.known[key][1]

    @property
    def microbatch_s(self) -> float:
        """Seconds per microbatch in the baseline."""
        return self.kept.step_s / self._microbatches

    def find(
        self, budget_bytes: int, *, starts: Iterable[State] = (), nearest: State | None = None, slowest_s: float = 0.0
    ) -> State:
        """Simulate `starts`, sweep, and return the best simulated state: with a budget of 0, the one with the lowest peak.

        `nearest` is the state of Megatron's own flags. If it fits and is nearly free, `starts` and the sweep are skipped.
        For `slowest_s`, see `is_nearly_free`.
        """
        # The baseline is the fastest and simplest plan if it fits.
        if self.kept.peak_bytes > budget_bytes:
            if nearest is not None and self._fits(nearest, budget_bytes) and self.is_nearly_free(nearest, slowest_s):
                self._swept.add(budget_bytes)
            else:
                for state in starts:
                    self.evaluate(state)
            if budget_bytes not in self._swept:
                self._swept.add(budget_bytes)
                self._sweep(budget_bytes)
        return self.pick(budget_bytes)

    def is_nearly_free(self, state: State, slowest_s: float = 0.0) -> bool:
        """Return whether a faster state would hardly make the whole step faster.

        `slowest_s` is the longest `microbatch_s` of all ranks. Faster ranks wait for the slowest one anyway.
        """
        return self.evaluate(state).step_s / self._microbatches <= _NEARLY_FREE * max(slowest_s, self.microbatch_s)

    def _fits(self, state: State, budget_bytes: int) -> bool:
        return self.evaluate(state).peak_bytes <= budget_bytes

    def borrow(self, others: Sequence["RankSearch"], budget_bytes: int) -> State | None:
        """Return the fastest state of `others`, ranks with the same layers, that fits this rank, or None if no state fits."""
        pool = [
            (cost.step_s / other.kept.step_s, number, state)
            for number, other in enumerate(others)
            for state, cost in other.known.values()
        ]
        for _, number, state in sorted(pool, key=lambda one: one[:2]):
            # Peaks of ranks with the same layers differ mainly by the bytes that the layers hold.
            beside_bytes = others[number].evaluate(state).peak_bytes - others[number].count_bytes(state)
            if beside_bytes + self.count_bytes(state) <= budget_bytes and self._fits(state, budget_bytes):
                return state
        return None

    def pick(self, budget_bytes: int) -> State:
        """Return the best simulated state."""
        return min((state for state, _ in self.known.values()), key=lambda state: self.score(state, budget_bytes))

    def score(self, state: State, budget_bytes: int) -> tuple[float, ...]:
        """Return a sort key (lower is better): bytes above the budget, step time, offloaded bytes, number of actions."""
        cost = self.evaluate(state)
        moved_bytes = sum(treatment.moved_bytes for treatment in state)
        rows = sum(len(treatment.actions) for treatment in state)
        # Rounded, because the order of summation affects the last digits.
        return (max(cost.peak_bytes - budget_bytes, 0), round(cost.step_s, 9), moved_bytes, rows)

    def count_bytes(self, state: State) -> int:
        """Return the bytes of static memory and, at most, of what layers keep for the microbatches in flight."""
        kept_bytes = [0] * len(self.rank.chunks)
        for slot, one in zip(self.slots, state, strict=True):
            kept_bytes[slot.chunk] += slot.layer.saved_bytes + one.kept_bytes
        return self.rank.static_bytes + find_fullest(self.rank, kept_bytes)[0]

    def _sweep(self, budget_bytes: int) -> None:
        """For each copy price and each starting state, find the first state within the budget by bisection."""
        link, late = self.rank.link, self.rank.late
        prices = [price / link.d2h_bytes_per_s for price in _COPY_PRICES]
        ordered = [_list_steps(self.slots, self.treatments, s_per_moved_byte=price, late=late) for price in prices]
        for all_steps, base in itertools.product(ordered, self._list_bases()):
            steps = [(place, treatment) for place, treatment in all_steps if place not in base]

            def fits(count: int, base: Base = base, steps: Sequence[tuple[int, Treatment]] = steps) -> bool:
                chosen = {**base, **dict(steps[:count])}
                state = tuple(chosen.get(place, KEEP) for place in range(len(self.slots)))
                return self._fits(state, budget_bytes)

            if fits(len(steps)):
                bisect.bisect_left(range(len(steps)), x=True, key=fits)

    def _list_bases(self) -> Iterator[Base]:
        """Yield the treatments at the start of each sweep. The first sweep starts from the baseline.

        If each offloaded tensor costs CPU time, further sweeps start from large offloads in evenly spaced layers.
        Copies of large groups take longer than a layer. To spread them, local search would have to change many layers at once.
        """
        yield {}
        if not self.rank.late.tensor_s:
            return
        layer = self.slots[0].layer
        offloads = [one for one in self.treatments[layer] if one.moved_bytes and not one.recompute_s]
        if offloads:
            most = max(offloads, key=lambda one: one.moved_bytes / self.rank.late.find(one.groups, one.tensors))
            places = [place for place, slot in enumerate(self.slots) if slot.layer == layer]
            for stride, offset in _SPREADS:
                chosen = places[offset::stride]
                yield from (dict.fromkeys(chosen[:count], most) for count in range(1, len(chosen) + 1))


def _list_steps(
    slots: Sequence[LayerSlot],
    treatments: Mapping[LayerModel, Sequence[Treatment]],
    *,
    s_per_moved_byte: float,
    late: LateCosts,
) -> list[tuple[int, Treatment]]:
    """Return pairs of a layer's index and its next treatment, ordered by the memory price at which the treatment pays off.

    For each kind of layer, the fastest treatments for each number of kept bytes form a convex curve. It begins with keeping
    everything and ends with keeping as little as possible. Each step along it frees bytes at a price. Steps are ordered by
    price. At equal prices, early layers come first, because backward needs their tensors last.
    """

    def cost(one: Treatment) -> float:
        return one.recompute_s + late.find(one.groups, one.tensors) + one.moved_bytes * s_per_moved_byte

    curves = {layer: _list_curve(rows, cost) for layer, rows in treatments.items()}
    found = []
    for place, slot in enumerate(slots):
        weight = slot.microbatches / max(slot.in_flight, 1)
        # Rounded, so that steps with equal prices in different chunks are ordered by layer.
        found += [(round(price * weight * 1e12, 3), place, treatment) for price, treatment in curves[slot.layer]]
    return [(place, treatment) for _, place, treatment in sorted(found, key=lambda step: step[:2])]


def _list_curve(rows: Sequence[Treatment], cost: Callable[[Treatment], float]) -> list[tuple[float, Treatment]]:
    """Return treatments by decreasing kept bytes, each with the price per byte of its section of the curve."""
    current, curve = rows[0], []
    while smaller := [one for one in rows if one.kept_bytes < current.kept_bytes]:
        prices = [max(0.0, cost(one) - cost(current)) / (current.kept_bytes - one.kept_bytes) for one in smaller]
        price, current = min(zip(prices, smaller, strict=True), key=lambda pair: (pair[0], pair[1].kept_bytes))
        # Treatments before `current` cost less in total but more per byte. They may be enough for the last layer that changes.
        before = [one for one in smaller if one.kept_bytes > current.kept_bytes and cost(one) < cost(current)]
        curve += [(price, one) for one in (*sorted(before, key=lambda one: -one.kept_bytes), current)]
    return curve
