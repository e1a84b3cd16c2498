"""Local search: changes the treatments of a rank's layers at random, and accepts changes that improve the plan.

A walk starts at one of the best known states. Each step draws several changes: a new treatment for one layer, for all layers
with the same treatment or for a range of layers, or a swap of two layers. The step estimates their costs from bytes and
recompute times, and simulates the most promising change. It accepts better states and, occasionally, slightly worse ones
(simulated annealing). Each walk charges its own price for bytes above the budget. States that exceed the budget are allowed,
because the best plans for very small budgets can be reached only through them.
"""

import collections
import math
import random
from collections.abc import Sequence

from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.solving.rank_search import RankCost, RankSearch
from fgoffload.planner.solving.states import State, make_key
from fgoffload.planner.solving.treatments import list_neighbours

_STEPS = 100  # steps of one walk
_DRAWN = 8  # number of changes drawn for each one simulated
_BLIND = 0.3  # probability of a random change instead of the most promising one, because estimates ignore queued copies
_TWICE = 0.3  # probability that a step combines two changes
_NEAR = 0.6  # probability that a new treatment differs in only one tag
_STARTS = 6  # number of best states from which walks start; walks from the single best state mostly return to it
_TEMPERATURE = 0.003  # temperature at the start of a walk, as a fraction of the step time; it falls to 0
_IDLE_WALKS = 3  # the search ends after this many consecutive walks that find hardly any new states

_LEAST_PRICE, _MOST_PRICE = 3.0, 120.0
"""Range of the price of a byte above the budget, relative to the cost per byte freed by recomputing whole layers."""


class LocalSearch:
    """Random walks over the states of one rank."""

    def __init__(self, search: RankSearch, budget_bytes: int) -> None:
        self._search = search
        self._budget_bytes = budget_bytes
        self._slots = search.slots
        self._random = random.Random(0)
        full_s = sum(slot.layer.forward_s * slot.microbatches for slot in self._slots)
        full_bytes = sum(slot.layer.saved_bytes * slot.in_flight for slot in self._slots)
        self._full_s_per_byte = full_s / max(full_bytes, 1)
        self._alike: dict[LayerModel, list[int]] = collections.defaultdict(list)
        for place, slot in enumerate(self._slots):
            self._alike[slot.layer].append(place)

    def run(self, simulations: int) -> None:
        """Walk until `simulations` more states are simulated, or until walks find hardly any new states."""
        known, idle = self._search.known, 0
        most = len(known) + simulations
        while len(known) < most and idle < _IDLE_WALKS:
            before = len(known)
            price = self._full_s_per_byte * _LEAST_PRICE * (_MOST_PRICE / _LEAST_PRICE) ** self._random.random()
            self._walk(price, most)
            # If a rank has few possible plans, walks soon find all of them.
            idle = 0 if len(known) >= before + _STEPS // 10 else idle + 1

    def _walk(self, price: float, most: int) -> None:
        def penalized_s(cost: RankCost) -> float:
            return cost.step_s + price * max(cost.peak_bytes - self._budget_bytes, 0)

        best = sorted(self._search.known.values(), key=lambda pair: penalized_s(pair[1]))[:_STARTS]
        # Squared, so that better states are drawn more often.
        state, cost = best[int(self._random.random() ** 2 * len(best))]
        for number in range(_STEPS):
            if len(self._search.known) >= most:
                return
            following = self._draw(state, cost, price)
            if following is None:
                continue
            other = self._search.evaluate(following)
            temperature = _TEMPERATURE * cost.step_s * (1 - number / _STEPS)
            worse_s = penalized_s(other) - penalized_s(cost)
            if worse_s <= 0 or self._random.random() < math.exp(-worse_s / temperature):
                state, cost = following, other

    def _draw(self, state: State, cost: RankCost, price: float) -> State | None:
        """Draw neighboring states, and return the most promising one that has not been simulated yet, or None."""
        s_per_byte = self._find_copy_price(state, cost)
        is_blind = self._random.random() < _BLIND
        promised = []
        for number in range(1 if is_blind else _DRAWN):
            following = self._change(state)
            if self._random.random() < _TWICE:
                following = self._change(following)
            longer_s, more_bytes = self._estimate(state, following, s_per_byte)
            above_s = price * max(cost.peak_bytes + more_bytes - self._budget_bytes, 0)
            promised.append((longer_s + above_s, number, following))
        for _, _, following in sorted(promised, key=lambda one: one[:2]):
            if make_key(following) not in self._search.known:
                return following
        return None

    def _find_copy_price(self, state: State, cost: RankCost) -> float:
        """Return the seconds per offloaded byte that `state` adds to the baseline's step, recompute excluded."""
        pairs = list(zip(self._slots, state, strict=True))
        moved_bytes = sum(one.moved_bytes * slot.microbatches for slot, one in pairs)
        recompute_s = sum(one.recompute_s * slot.microbatches for slot, one in pairs)
        longer_s = cost.step_s - self._search.kept.step_s - recompute_s
        return max(longer_s, 0.0) / moved_bytes if moved_bytes else 0.0

    def _estimate(self, state: State, following: State, s_per_byte: float) -> tuple[float, float]:
        longer_s = more_bytes = 0.0
        for slot, before, after in zip(self._slots, state, following, strict=True):
            if before is not after:
                copied_s = (after.moved_bytes - before.moved_bytes) * s_per_byte
                longer_s += (after.recompute_s - before.recompute_s + copied_s) * slot.microbatches
                more_bytes += (after.kept_bytes - before.kept_bytes) * slot.in_flight
        return longer_s, more_bytes

    def _change(self, state: State) -> State:
        place, kind = self._random.randrange(len(state)), self._random.random()
        alike = self._alike[self._slots[place].layer]
        if kind < 0.65:
            same = [other for other in alike if state[other].actions == state[place].actions]
            return self._treat(state, same if self._random.random() < 0.3 else [place])
        layers, other = list(state), self._random.choice(alike)
        if kind < 0.8:  # copy this layer's treatment to a range of layers
            for between in alike:
                if min(place, other) <= between <= max(place, other):
                    layers[between] = state[place]
        else:
            layers[place], layers[other] = layers[other], layers[place]
        return tuple(layers)

    def _treat(self, state: State, places: Sequence[int]) -> State:
        layer = self._slots[places[0]].layer
        chosen = self._random.choice(self._search.treatments[layer])
        if self._random.random() < _NEAR:
            numel = self._search.rank.min_offloaded_numel
            near = list_neighbours(layer, state[places[0]].actions, min_offloaded_numel=numel)
            chosen = self._random.choice(near or [chosen])
        return tuple(chosen if place in places else one for place, one in enumerate(state))
