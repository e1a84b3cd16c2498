"""The search for the best plan of one rank that never waits for its neighbours: programs, corrected by simulations, and walks.

The simulator judges everything. The program is right about most of a plan and wrong about where in a pass a copy is waited for:
how far its peak was off comes off the budget that it gets next, and what was late adds to its price of a moved byte.
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
"""Times that the program of a rank is solved: again where its peak or its time was off."""

_CLOSE_PARTS = 40
"""A peak within this part below the budget is close enough: the program is not solved again to use the rest."""

_LATE_PARTS = 0.003
"""A step longer than the program said by less than this part of it is as the program said. Else copies cost more next time."""


class CostTable:
    """Costs of layer treatments, measured once for all ranks with the same layers, link and rules."""

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
        costs: Of all ranks.
        loss_window_bytes: What may be in flight to the host when a loss begins; None for what the policy lets.

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
        """Forwards and backwards of single layers in a simulation."""
        is_far_ahead = rank.host_pace in (HostPace.PASS_AHEAD, HostPace.STEP_AHEAD) and rank.turning_chunk is None
        self._held_bytes = rank.policy.window_bytes if is_far_ahead else 0
        """Of what was offloaded last, where the host runs ahead: programs take it for gone, and the device holds it."""
        self._local: LocalSearch | None = None
        self._solved: set[int] = set()
        """Budgets that programs were solved for."""

    @property
    def kept(self) -> Verdict:
        """Return what keeping everything comes to."""
        return self.judge(keep_all(self.slots))

    def judge(self, state: State) -> Verdict:
        """Return what the simulator says of `state`. The same one is simulated once."""
        key = make_key(state)
        if key not in self.known:
            plan = make_plan([(self.slots, state)], loss_window_bytes=self.loss_window_bytes)
            result = simulate_rank(self.rank, plan)
            verdict = Verdict(result.step_s, result.peak_bytes, result.loss_window_bytes)
            self.known[key] = (state, verdict)
        return self.known[key][1]

    def find(self, budget_bytes: int, *, starts: Iterable[State]) -> State:
        """Return the best of what programs, `starts` and everything known come to; with a budget of 0, the least peak."""
        kept = keep_all(self.slots)
        # Nothing is faster than to keep all, and of plans that are as fast it is the simplest.
        if self.judge(kept).peak_bytes <= budget_bytes:
            return kept
        for state in (*starts, self._free_most()):
            self.judge(state)
        if budget_bytes not in self._solved:
            self._solved.add(budget_bytes)
            self._run_programs(budget_bytes)
        return self.pick(budget_bytes)

    def borrow(self, others: Sequence["RankSearch"], budget_bytes: int) -> State | None:
        """Return the fastest of the states that `others`, with the same layers, know and that fits here; None if none does."""
        pool = [
            (verdict.step_s / other.kept.step_s, number, state)
            for number, other in enumerate(others)
            for state, verdict in other.known.values()
        ]
        for _, number, state in sorted(pool, key=lambda one: one[:2]):
            # What beside the layers' bytes makes a peak is about the same on ranks with the same layers.
            beside_bytes = others[number].judge(state).peak_bytes - others[number].count_bytes(state)
            if beside_bytes + self.count_bytes(state) <= budget_bytes and self.judge(state).peak_bytes <= budget_bytes:
                return state
        return None

    def count_bytes(self, state: State) -> int:
        """Return the most bytes of static memory and of what layers keep for microbatches in flight."""
        kept_bytes = [0] * len(self.rank.chunks)
        for slot, treatment in zip(self.slots, state, strict=True):
            kept_bytes[slot.chunk] += slot.layer.saved_bytes + treatment.kept_bytes
        most_bytes = 0
        for in_flight in list_in_flight(self.rank.passes, len(kept_bytes)):
            most_bytes = max(most_bytes, sum(map(operator.mul, in_flight, kept_bytes)))
        return self.rank.static_bytes + most_bytes

    def improve(self, budget_bytes: int, *, simulations: int) -> State:
        """Return the best state known after so many more simulations of walks."""
        if self.kept.peak_bytes > budget_bytes:
            if self._local is None:
                self._local = LocalSearch(self.rank, self._treatments, judge=self.judge, known=self.known, kept=self.kept)
            self._local.run(budget_bytes, simulations=simulations)
        return self.pick(budget_bytes)

    def pick(self, budget_bytes: int) -> State:
        """Return the best state known."""
        return min((state for state, _ in self.known.values()), key=lambda state: self.score(state, budget_bytes))

    def score(self, state: State, budget_bytes: int) -> tuple[float, ...]:
        """Return what a better state has less of: bytes above the budget, time, moved bytes, rows."""
        verdict = self.judge(state)
        moved_bytes = sum(treatment.moved_bytes for treatment in state)
        rows = sum(len(treatment.actions) for treatment in state)
        # Sums of the same times in another order differ in their last digits.
        return (max(verdict.peak_bytes - budget_bytes, 0), round(verdict.step_s, 9), moved_bytes, rows)

    def _run_programs(self, budget_bytes: int) -> None:
        """Judge what programs come to, each corrected by what the peak and the time of the one before were off."""
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
            # What a plan keeps goes in steps of a layer: by so much less nothing else was found, so by twice as much.
            asked_bytes = min(asked_bytes - above_bytes * (2 if is_repeated else 1), budget_bytes)
            last = result

    def _solve(self, budget_bytes: int, s_per_moved_byte: float) -> ProgramResult | None:
        costs = self._costs.get(self.rank, self._treatments)
        result = None
        if budget_bytes > self.rank.static_bytes:
            result = solve_program(self.rank, costs, budget_bytes=budget_bytes, s_per_moved_byte=s_per_moved_byte)
        # Where nothing fits by its count, something may fit all the same: what has the least peak.
        return result or solve_program(self.rank, costs, budget_bytes=None)

    def _count_moved_bytes(self, state: State) -> int:
        """Return the bytes that are offloaded in a step."""
        counts = {slot.chunk: count_backwards(self.rank.passes, chunk=slot.chunk) for slot in self.slots}
        return sum(one.moved_bytes * counts[slot.chunk] for slot, one in zip(self.slots, state, strict=True))

    def _free_most(self) -> State:
        """Return the state in which every layer keeps the least that it can."""
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
    """Return `rank` without what only says where it is: ranks that are equal then have the same best plan."""
    chunks = tuple(
        dataclasses.replace(
            chunk, layers=tuple(dataclasses.replace(layer, number=place) for place, layer in enumerate(chunk.layers))
        )
        for chunk in rank.chunks
    )
    return dataclasses.replace(rank, rank=0, chunks=chunks)
