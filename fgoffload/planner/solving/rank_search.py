"""Searches for the best plan of one rank, without waits for its neighbours. The simulator evaluates every state.

A sweep raises the price of device memory step by step until the rank fits its budget. How much of a copy is hidden depends on
the rest of the plan, so we sweep at several prices of an offloaded byte. Local search (`local_search`) improves on the results.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.states import LayerSlot, State, list_slots, make_key, make_plan, shorten
from fgoffload.planner.solving.treatments import KEEP, Treatment, list_treatments

_COPY_PRICES = (0.03, 0.2, 0.4, 0.8)  # copy prices of the sweeps: fraction of the copy time to the host counted as step time


class Verdict(NamedTuple):
    """Simulated cost of a state."""

    step_s: float  # seconds of the step
    peak_bytes: int  # peak device bytes
    loss_window_bytes: int  # maximum bytes in flight to the host at the start of a loss


class RankSearch:
    """The search for the best plan of one rank. Without `loss_window_bytes` the policy limits the bytes in flight at a loss."""

    def __init__(self, rank: RankModel, *, loss_window_bytes: int | None) -> None:
        self.rank = shorten(rank)
        self.slots = list_slots(self.rank)
        self.known: dict[object, tuple[State, Verdict]] = {}  # simulated states, by `make_key`
        self.loss_window_bytes = loss_window_bytes
        # With few layers, use finer steps per layer, so that a plan uses its whole budget.
        parts, numel = max(20, 80 // max(len(self.slots), 1)), rank.min_offloaded_numel
        self.treatments: Mapping[LayerModel, Sequence[Treatment]] = {
            layer: list_treatments(layer, min_offloaded_numel=numel, group_s=rank.late_group_s, parts=parts)
            for layer in dict.fromkeys(slot.layer for slot in self.slots)
        }
        self.layer_passes = sum(len(self.rank.chunks[one.chunk].layers) for one in self.rank.passes)  # of a simulation
        self._swept: set[int] = set()  # budgets of earlier sweeps

    @property
    def kept(self) -> Verdict:
        """Return the simulated cost of the baseline."""
        return self.judge((KEEP,) * len(self.slots))

    def judge(self, state: State) -> Verdict:
        """Return the simulated costs of `state`; each state is simulated once."""
        key = make_key(state)
        if key not in self.known:
            plan = make_plan([(self.slots, state)], loss_window_bytes=self.loss_window_bytes)
            result = simulate_rank(self.rank, plan)
            self.known[key] = (state, Verdict(result.step_s, result.peak_bytes, result.loss_window_bytes))
        return self.known[key][1]

    def find(self, budget_bytes: int, *, starts: Iterable[State]) -> State:
        """Return the best state of sweeps, `starts` and all known ones; with a budget of 0, the one with the lowest peak."""
        # The baseline is the fastest and simplest plan if it fits.
        if self.kept.peak_bytes > budget_bytes:
            for state in starts:
                self.judge(state)
            if budget_bytes not in self._swept:
                self._swept.add(budget_bytes)
                self._sweep(budget_bytes)
        return self.pick(budget_bytes)

    def borrow(self, others: Sequence["RankSearch"], budget_bytes: int) -> State | None:
        """Return the fastest fitting state that `others`, ranks with the same layers, know; None if none fits."""
        pool = [
            (verdict.step_s / other.kept.step_s, number, state)
            for number, other in enumerate(others)
            for state, verdict in other.known.values()
        ]
        for _, number, state in sorted(pool, key=lambda one: one[:2]):
            # The rest of the peak, besides the layers' bytes, is similar on ranks with the same layers.
            beside_bytes = others[number].judge(state).peak_bytes - others[number].count_bytes(state)
            if beside_bytes + self.count_bytes(state) <= budget_bytes and self.judge(state).peak_bytes <= budget_bytes:
                return state
        return None

    def pick(self, budget_bytes: int) -> State:
        """Return the best known state."""
        return min((state for state, _ in self.known.values()), key=lambda state: self.score(state, budget_bytes))

    def score(self, state: State, budget_bytes: int) -> tuple[float, ...]:
        """Return the sort key, lower is better: bytes above the budget, step time, offloaded bytes, rows."""
        verdict = self.judge(state)
        moved_bytes = sum(treatment.moved_bytes for treatment in state)
        rows = sum(len(treatment.actions) for treatment in state)
        # Sums of equal times in another order differ in their last digits.
        return (max(verdict.peak_bytes - budget_bytes, 0), round(verdict.step_s, 9), moved_bytes, rows)

    def count_bytes(self, state: State) -> int:
        """Return the bytes of static memory and of layers for microbatches in flight."""
        pairs = zip(self.slots, state, strict=True)
        return self.rank.static_bytes + sum(slot.in_flight * (slot.layer.saved_bytes + one.kept_bytes) for slot, one in pairs)

    def _sweep(self, budget_bytes: int) -> None:
        """Bisect at each copy price for the first state within the budget."""
        for price in _COPY_PRICES:
            s_per_byte = price / self.rank.link.d2h_bytes_per_s
            steps = _list_steps(self.slots, self.treatments, s_per_moved_byte=s_per_byte, s_per_group=self.rank.late_group_s)

            def fits(count: int, steps: Sequence[tuple[int, Treatment]] = steps) -> bool:
                chosen = dict(steps[:count])
                state = tuple(chosen.get(place, KEEP) for place in range(len(self.slots)))
                return self.judge(state).peak_bytes <= budget_bytes

            if fits(len(steps)):
                bisect.bisect_left(range(len(steps)), x=True, key=fits)


def _list_steps(
    slots: Sequence[LayerSlot],
    treatments: Mapping[LayerModel, Sequence[Treatment]],
    *,
    s_per_moved_byte: float,
    s_per_group: float,
) -> list[tuple[int, Treatment]]:
    """Return places of layers and their next treatments, in the order in which a rising price of device memory selects them.

    For each kind of layer, the fastest treatments per number of kept bytes form a convex curve from keeping everything to
    keeping as little as possible. Each step along it frees bytes at a price. Steps are ordered by price, then early layers
    first, because they have the most time until backward needs their tensors.
    """

    def cost(one: Treatment) -> float:
        return one.recompute_s + one.groups * s_per_group + one.moved_bytes * s_per_moved_byte

    curves = {layer: _list_curve(rows, cost) for layer, rows in treatments.items()}
    found = []
    for place, slot in enumerate(slots):
        weight = slot.microbatches / max(slot.in_flight, 1)
        # Rounded, so that equal prices of different chunks stay in the order of layers.
        found += [(round(price * weight * 1e12, 3), place, treatment) for price, treatment in curves[slot.layer]]
    return [(place, treatment) for _, place, treatment in sorted(found, key=lambda step: step[:2])]


def _list_curve(rows: Sequence[Treatment], cost: Callable[[Treatment], float]) -> list[tuple[float, Treatment]]:
    """Return treatments by decreasing kept bytes, each with the price per byte at the end of its segment of the curve."""
    current, curve = rows[0], []
    while smaller := [one for one in rows if one.kept_bytes < current.kept_bytes]:
        prices = [max(0.0, cost(one) - cost(current)) / (current.kept_bytes - one.kept_bytes) for one in smaller]
        price, current = min(zip(prices, smaller, strict=True), key=lambda pair: (pair[0], pair[1].kept_bytes))
        # Treatments before it cost less in total but more per byte. They come first: the last changed layer may need no more.
        before = [one for one in smaller if one.kept_bytes > current.kept_bytes and cost(one) < cost(current)]
        curve += [(price, one) for one in (*sorted(before, key=lambda one: -one.kept_bytes), current)]
    return curve
