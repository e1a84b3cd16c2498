"""The search for the best plan of one rank that never waits for its neighbours: programs, corrected by simulations, and walks.

The simulator judges every state. A program is right about most of a plan, and wrong about where in a pass compute waits for a
copy. The error of its peak lowers the next budget, and the error of its time raises the price of an offloaded byte.
"""

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence

from fgoffload.errors import ConfigError
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import HostPace, RankModel
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.layer_costs import LayerCosts, measure_costs
from fgoffload.planner.solving.local_search import Known, LocalSearch, Verdict
from fgoffload.planner.solving.peak_times import count_backwards, list_in_flight, shorten
from fgoffload.planner.solving.program import ProgramResult, solve_program
from fgoffload.planner.solving.states import Order, State, keep_all, list_slots, make_key, make_plan, place_counts
from fgoffload.planner.solving.treatments import Treatment, list_treatments

_PROGRAMS = 4
"""Most programs of a rank: another one if the peak or the time was off."""

_CLOSE_PARTS = 40
"""Unused part of the budget that is not worth another program."""

_LATE_PARTS = 0.003
"""Error of a program's step, as a part, from which copies cost more in the next program."""


class CostTable:
    """Costs of layer treatments, simulated once for all ranks with the same layers, link and rules."""

    def __init__(self) -> None:
        self._known: dict[object, LayerCosts] = {}

    def get(self, rank: RankModel, treatments: Mapping[str, Sequence[Treatment]]) -> dict[str, LayerCosts]:
        """Return the costs of each kind of layer of a rank."""
        longest = max((len(chunk.layers) for chunk in rank.chunks), default=0)
        rules = (rank.link, rank.late_group_s, rank.policy, rank.min_offloaded_numel, rank.host_budget_bytes is None, longest)
        found = {}
        for kind, model in list_kinds(rank).items():
            key = (model, rules, len(rank.chunks) > 1)
            if key not in self._known:
                self._known[key] = measure_costs(rank, model, treatments[kind])
            found[kind] = self._known[key]
        return found


class RankSearch:
    """The search for the best plan of one rank.

    Args:
        rank: The rank.
        costs: Costs of treatments, shared by all ranks.
        loss_window_bytes: Most bytes in flight to the host when a loss begins; None leaves it to the policy.

    Raises:
        ConfigError: Two kinds of layers have one name.
    """

    def __init__(self, rank: RankModel, *, costs: CostTable, loss_window_bytes: int | None) -> None:
        self.rank = shorten(rank)
        self.slots = list_slots(rank)
        self.known: Known = {}
        self._costs = costs
        self.loss_window_bytes = loss_window_bytes
        self._treatments = {
            kind: list_treatments(
                model,
                min_offloaded_numel=rank.min_offloaded_numel,
                group_s=rank.late_group_s,
                is_alone=max(len(chunk.layers) for chunk in rank.chunks) == 1 < len(rank.chunks),
            )
            for kind, model in list_kinds(rank).items()
        }
        self.layer_passes = sum(len(self.rank.chunks[one.chunk].layers) for one in self.rank.passes)
        """Number of forwards and backwards of single layers in a simulation."""
        is_far_ahead = rank.host_pace in (HostPace.PASS_AHEAD, HostPace.STEP_AHEAD) and rank.turning_chunk is None
        self._held_bytes = rank.policy.window_bytes if is_far_ahead else 0
        """Bytes of the last offloaded groups still on the device if the host runs ahead; programs count them as freed."""
        self._local: LocalSearch | None = None
        self._solved: set[int] = set()
        """Budgets of earlier programs."""

    @property
    def kept(self) -> Verdict:
        """Return the costs of keeping everything."""
        return self.judge(keep_all(self.slots))

    def judge(self, state: State) -> Verdict:
        """Return the simulated costs of `state`; each state is simulated once."""
        key = make_key(state)
        if key not in self.known:
            plan = make_plan([(self.slots, state)], loss_window_bytes=self.loss_window_bytes)
            result = simulate_rank(self.rank, plan)
            verdict = Verdict(result.step_s, result.peak_bytes, result.loss_window_bytes)
            self.known[key] = (state, verdict)
        return self.known[key][1]

    def find(self, budget_bytes: int, *, starts: Iterable[State]) -> State:
        """Return the best state of programs, `starts` and all known ones; with a budget of 0, the one with the least peak."""
        kept = keep_all(self.slots)
        # Nothing is faster than keeping everything, and of equally fast plans it is the simplest.
        if self.judge(kept).peak_bytes <= budget_bytes:
            return kept
        for state in (*starts, self._free_most()):
            self.judge(state)
        if budget_bytes not in self._solved:
            self._solved.add(budget_bytes)
            self._run_programs(budget_bytes)
        return self.pick(budget_bytes)

    def borrow(self, others: Sequence["RankSearch"], budget_bytes: int) -> State | None:
        """Return the fastest state that fits here of those that `others`, with the same layers, know; None if none fits."""
        pool = [
            (verdict.step_s / other.kept.step_s, number, state)
            for number, other in enumerate(others)
            for state, verdict in other.known.values()
        ]
        for _, number, state in sorted(pool, key=lambda one: one[:2]):
            # Peaks beside the layers' bytes are about the same on ranks with the same layers.
            beside_bytes = others[number].judge(state).peak_bytes - others[number].count_bytes(state)
            if beside_bytes + self.count_bytes(state) <= budget_bytes and self.judge(state).peak_bytes <= budget_bytes:
                return state
        return None

    def count_bytes(self, state: State) -> int:
        """Return the most bytes of static memory and of layers for microbatches in flight."""
        kept_bytes = [0] * len(self.rank.chunks)
        for slot, treatment in zip(self.slots, state, strict=True):
            kept_bytes[slot.chunk] += slot.layer.saved_bytes + treatment.kept_bytes
        most_bytes = 0
        for in_flight in list_in_flight(self.rank.passes, len(kept_bytes)):
            most_bytes = max(most_bytes, sum(map(operator.mul, in_flight, kept_bytes)))
        return self.rank.static_bytes + most_bytes

    def improve(self, budget_bytes: int, *, simulations: int) -> State:
        """Return the best known state after `count` more simulations of walks."""
        if self.kept.peak_bytes > budget_bytes:
            if self._local is None:
                self._local = LocalSearch(self.rank, self._treatments, judge=self.judge, known=self.known, kept=self.kept)
            self._local.run(budget_bytes, simulations=simulations)
        return self.pick(budget_bytes)

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

    def _run_programs(self, budget_bytes: int) -> None:
        """Simulate the results of programs, each corrected by the errors of the one before in peak and time."""
        asked_bytes, s_per_moved_byte = budget_bytes - self._held_bytes, 0.0
        last: ProgramResult | None = None
        for _ in range(_PROGRAMS if budget_bytes else 1):
            result = self._solve(asked_bytes, s_per_moved_byte)
            if result is None:
                return
            best = min(
                (place_counts(result, self.slots, order) for order in Order), key=lambda one: self.score(one, budget_bytes)
            )
            verdict = self.judge(best)
            above_bytes = verdict.peak_bytes - budget_bytes
            late_s = verdict.step_s - self.kept.step_s - result.added_s
            is_late = late_s > _LATE_PARTS * verdict.step_s
            is_close = -budget_bytes // _CLOSE_PARTS <= above_bytes <= 0
            is_repeated = last is not None and result.chunks == last.chunks
            if (is_close and not is_late) or (is_repeated and above_bytes <= 0):
                return
            if is_late:
                s_per_moved_byte += late_s / max(self._count_moved_bytes(best), 1)
            # Kept bytes change by whole layers: this correction found the same plan again, so double it.
            asked_bytes = min(asked_bytes - above_bytes * (2 if is_repeated else 1), budget_bytes)
            last = result

    def _solve(self, budget_bytes: int, s_per_moved_byte: float) -> ProgramResult | None:
        costs = self._costs.get(self.rank, self._treatments)
        result = None
        if budget_bytes > self.rank.static_bytes:
            result = solve_program(self.rank, costs, budget_bytes=budget_bytes, s_per_moved_byte=s_per_moved_byte)
        # The plan with the least peak may fit even if nothing fits by the program's count.
        return result or solve_program(self.rank, costs, budget_bytes=None)

    def _count_moved_bytes(self, state: State) -> int:
        """Return the offloaded bytes of a step."""
        counts = {slot.chunk: count_backwards(self.rank.passes, chunk=slot.chunk) for slot in self.slots}
        return sum(one.moved_bytes * counts[slot.chunk] for slot, one in zip(self.slots, state, strict=True))

    def _free_most(self) -> State:
        """Return the state in which every layer keeps as little as possible."""
        least = {
            kind: min(treatments, key=lambda one: (one.kept_bytes, one.recompute_s))
            for kind, treatments in self._treatments.items()
        }
        return tuple(least[slot.layer.kind] for slot in self.slots)


def list_kinds(rank: RankModel) -> dict[str, LayerModel]:
    """Return the kinds of layers of a rank, by name.

    Raises:
        ConfigError: Two kinds have one name.
    """
    models: dict[str, LayerModel] = {}
    for chunk in rank.chunks:
        for layer in chunk.layers:
            if models.setdefault(layer.model.kind, layer.model) != layer.model:
                raise ConfigError(
                    f"pipeline rank {rank.rank} has two kinds of layer {layer.model.kind!r} that differ: layer {layer.number} "
                    "is unlike one before it. Give each kind a name of its own."
                )
    return models


def strip_place(rank: RankModel) -> RankModel:
    """Return `rank` without its number: ranks that are equal then have the same best plan."""
    chunks = tuple(
        dataclasses.replace(
            chunk, layers=tuple(dataclasses.replace(layer, number=place) for place, layer in enumerate(chunk.layers))
        )
        for chunk in rank.chunks
    )
    return dataclasses.replace(rank, rank=0, chunks=chunks)
