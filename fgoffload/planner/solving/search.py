"""The best plan of one rank: the program's, placed, simulated, corrected and then bettered one site at a time.

The simulator is the judge of everything. The program is right about most of a plan and wrong about where in a pass a copy is
waited for; how far its peak was off comes off the budget that it gets next. What is left is found by `moves`.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fgoffload.planner.ranks.rank_model import HostPace, RankModel
from fgoffload.planner.solving.choices import Mode, count_configurations, list_configurations
from fgoffload.planner.solving.copy_price import CopyPrice, find_link_price
from fgoffload.planner.solving.frontier import SHORT_CHUNK, LayerPoints
from fgoffload.planner.solving.host_work import count_host_s
from fgoffload.planner.solving.ladders import count_rungs, find_lowest, list_ladders, list_tightened
from fgoffload.planner.solving.moments import count_backwards, list_moments
from fgoffload.planner.solving.moves import Move, Prices, apply_move, list_changes, list_pairs, list_swaps, order_moves
from fgoffload.planner.solving.placement import (
    LayerSlot,
    Order,
    State,
    drop_row,
    free_most,
    keep_all,
    list_rows,
    list_slots,
    make_plan,
    place_counts,
)
from fgoffload.planner.solving.program import ProgramResult, solve_program
from fgoffload.planner.solving.search_limits import SearchLimits
from fgoffload.planner.solving.verdict import Judge, Knowledge, Verdict, make_key
from fgoffload.planner.solving.walks import Walks
from fgoffload.planner.solving.ways import list_ways
from fgoffload.planner.worker_processes import map_in_processes

_CLOSE_PARTS = 40
"""A peak within this part below the budget is close enough: the program is not solved again to use the rest."""

_LATE_PARTS = 0.01
"""A step longer than the program said by less than this part of it is as the program said. Else copies cost more next time."""
_LATE_BESIDE_WATCHED_PARTS = 0.003
"""The same in short chunks. There last layers that are watched may be the reason: next time they are not, and then copies cost
more. In long chunks a step is off by as much for other reasons, and prices for those made Llama-3 8B 1% slower."""

_MORE_PROGRAMS = 2
"""Beyond the limit, where no program's plan has fit yet, or the price of copies lies between two that are known to be wrong."""

_DOUBTS = (0.02, 0.2, math.inf)
"""How far moves may exceed the budget by estimate and are tried all the same, as a part of what plans have a say in: first
those that should fit, then those that may, and at last all of them, with those that should be slower."""

_CELLS = 96
"""From the static memory to what keeping all takes. See [Note: Cells of budgets] in `walks`."""

_FEWEST_WALKED = 280
"""Simulations: fewer lead walks nowhere. 296 make plans for the 27 layers of DeepSeek-V2-Lite up to 10% faster near its least
budget, 250 those for the 32 layers of Llama-3 8B by no more than 0.05%, for seconds of search."""

_NEAR_PARTS = 10
"""On few layers walks are tried for budgets up to such a part of the way from what full recompute takes to what keeping all
takes. Plans of six layers were 1 to 13% faster by them up to a twentieth of that way, at a tenth 1 to 2%."""

_SCALE = 12
"""Steps from the static memory to what keeping all takes: budgets of which programs are solved whatever the budget is."""
_LOOSER = 2
"""How many of those above the budget are solved."""

_ALIKE = 0.0025
"""By how much a plan may be slower by the simulator, as a part of a step, if the host has more than that less to do."""

_REPAIRS = 12
"""Simulations to bring the fastest plan within the budget where it is a little above it. A few are enough, or none are."""


Score = Callable[[State, int], tuple[float, ...]]
"""What a better state has less of, within a budget in bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search came to on one rank."""

    state: State
    """What its layers do."""
    verdict: Verdict
    """What the judge says of it."""
    program: ProgramResult | None = None
    """The last program that it began from, or None where none was needed."""
    off_bytes: int = 0
    """How much higher the simulated peak was than that program's."""
    kept_s: float
    """How long the step takes where everything is kept."""

    @property
    def gap(self) -> float:
        """How much longer the step is than the bound of the program, as a part of it."""
        return math.inf if self.program is None else self.verdict.step_s / (self.kept_s + self.program.bound_s) - 1

    def is_far(self, budget_bytes: int, *, gap: float) -> bool:
        """Return whether the step is longer than the bound by more than `gap`, or it or the program is above the budget."""
        program_bytes = 0 if self.program is None else self.program.peak_bytes
        return self.gap > gap or max(program_bytes, self.verdict.peak_bytes) > budget_bytes


class RankSearch:
    """The search for the best plan of one rank.

    Args:
        rank: The rank.
        modes: What each kind of its layers may choose from.
        points: Measures what is worth having of that, for programs. Not called where none is needed.
        judge: Says how good a plan is.
        judge_digits: Says the same, down to the last digits of its seconds.
        judge_peaks: Says the same, and the most on the device at each stretch.
        tries_all: Whether all plans for the rank are simulated, in place of programs and what betters them.
        limits: How long to look otherwise.
        deadline_s: When to stop, by `time.monotonic`.
    """

    def __init__(
        self,
        rank: RankModel,
        modes: Mapping[str, Sequence[Mode]],
        *,
        points: Callable[[], Mapping[str, LayerPoints]],
        judge: Judge,
        judge_digits: Judge,
        judge_peaks: Judge,
        tries_all: bool,
        limits: SearchLimits,
        deadline_s: float = math.inf,
    ) -> None:
        self.rank = rank
        self.modes = modes
        self.slots = list_slots(rank)
        self.simulations = 0
        """How many were run."""
        self._judge = judge
        self._judge_digits = judge_digits
        self._judge_peaks = judge_peaks
        self._points = points
        self._tries_all = tries_all
        self._limits = limits
        self._deadline_s = deadline_s
        self.knowledge: Knowledge = {}
        """What was found out so far."""
        self._digits: dict[object, Verdict] = {}
        """The same down to the last digits, of what programs came to and of what ranks begin with."""
        self._loose: dict[int, list[State]] = {}
        self._in_flight = _count_in_flight_at_peak(rank)
        self.layer_passes = count_layer_passes(rank)
        """Forwards and backwards of single layers in a simulation."""
        is_far_ahead = rank.host_pace in (HostPace.PASS_AHEAD, HostPace.STEP_AHEAD) and rank.turning_chunk is None
        self._held_bytes = rank.policy.window_bytes if is_far_ahead else 0
        """Of what left last, where the host runs ahead and lets go of nothing before a loss: programs take it for gone, and the
        device holds it."""
        self._microbatches = tuple(count_backwards(rank.passes, chunk=chunk) for chunk in range(len(rank.chunks)))

    @property
    def plans(self) -> int:
        """Return how many plans there are for the rank."""
        return count_plans(self.slots, self.modes)

    def judge(self, state: State) -> Verdict:
        """Return what the judge says of `state`; the same one is asked about once."""
        key = make_key(state)
        if key not in self.knowledge:
            self.simulations += 1
            self.knowledge[key] = (state, self._judge(make_plan([(self.slots, state)])))
        return self.knowledge[key][1]

    def _judge_to_digits(self, state: State) -> Verdict:
        """Return what the judge says of `state`, down to the last digits: what decides by these asks for them."""
        key = make_key(state)
        if key not in self._digits:
            self._digits[key] = self._judge_digits(make_plan([(self.slots, state)]))
            self.simulations += key not in self.knowledge
            self.knowledge.setdefault(key, (state, self._digits[key]))
        return self._digits[key]

    def count_added_s(self, verdict: Verdict) -> float:
        """Return the seconds that a step is longer than where all is kept."""
        return verdict.step_s - self.judge(keep_all(self.slots, self.modes)).step_s

    def learn(self, knowledge: Knowledge) -> None:
        """Take over what a copy of this search has found out, which began with all that this one knows."""
        self.simulations += len(knowledge) - len(self.knowledge)
        self.knowledge = knowledge

    def prepare(self, budget_bytes: int) -> None:
        """Measure what programs need to know of the layers, where there are any."""
        if self.needs_programs(budget_bytes):
            self._points()

    def needs_programs(self, budget_bytes: int) -> bool:
        """Return whether `find_start` solves any."""
        return not self._tries_all and self.judge(keep_all(self.slots, self.modes)).peak_bytes > budget_bytes

    def score(self, state: State, budget_bytes: int) -> tuple[float, ...]:
        """Return what a better plan has less of: bytes above the budget, time, bytes that leave, rows."""
        verdict = self.judge(state)
        moved_bytes = sum(configuration.moved_bytes for configuration in state)
        rows = sum(len(configuration.actions) for configuration in state)
        # Sums of the same times in another order differ in their last digits.
        return (max(verdict.peak_bytes - budget_bytes, 0), round(verdict.step_s, 9), moved_bytes, rows)

    def find_start(self, budget_bytes: int, *, starts: Sequence[State] = (), off_bytes: int = 0) -> Found:
        """Return the best of what programs, `starts` and all that was tried before come to, or what has the least peak.

        Args:
            budget_bytes: Of the device. 0 asks for the least peak.
            starts: Plans to begin from as well.
            off_bytes: How much the program is expected to be off, as on a rank that is much like this one.
        """
        kept = keep_all(self.slots, self.modes)
        # Nothing is faster than to keep all, and of plans that are as fast it is the simplest.
        if self.judge(kept).peak_bytes <= budget_bytes:
            return self._make_found(kept)
        if self._tries_all:
            return self._make_found(self._pick(self.list_states(), budget_bytes))
        off_bytes = off_bytes or self._held_bytes
        states = [kept, *starts]
        program, off_bytes = self._add_programs(states, budget_bytes, off_bytes)
        states += [state for state, _ in self.knowledge.values()]
        best = self._repair(states, budget_bytes) if budget_bytes else self._pick(states, budget_bytes)
        if self.judge(best).peak_bytes > budget_bytes:
            best = self._pick([best, free_most(self.slots, self.modes)], budget_bytes)
        return self._make_found(best, program, off_bytes)

    def widen_found(self, found: Found, budget_bytes: int, *, starts: Sequence[State], simulations: int) -> Found:
        """Return the best of `found`, `starts` and, with so many more simulations, plans by rule of thumb; repaired."""
        if self._is_done(found, budget_bytes) or not budget_bytes:
            return found
        before = self.simulations
        states = [found.state, *starts, *self._climb_ladders(budget_bytes, simulations)]
        if self.simulations == before:
            return found
        state = self._repair(states, budget_bytes)
        return dataclasses.replace(found, state=state, verdict=self.judge(state))

    def is_near_full(self, full: State, budget_bytes: int) -> bool:
        """Return whether there is little more room than for `full`, which runs all again, or less.

        There a bound says nothing on few layers: plans less than 1% above it were up to 11% slower than others that fit.
        """
        full_bytes = self.judge(full).peak_bytes
        kept_bytes = self.judge(keep_all(self.slots, self.modes)).peak_bytes
        return _NEAR_PARTS * (budget_bytes - full_bytes) < kept_bytes - full_bytes

    def walk(self, found: Found, budget_bytes: int, *, usual: Sequence[State], simulations: int) -> Found:
        """Return the best of `found` and of what random walks come to in the cell of the budget and in the one below.

        Args:
            found: What is known to be good.
            budget_bytes: Of the device.
            usual: What walks begin with beside rules of thumb: the same for all budgets of a cell.
            simulations: Of the walks.
        """
        if self._is_done(found, budget_bytes) or not budget_bytes or simulations < _FEWEST_WALKED:
            return found
        kept_bytes = self.judge(keep_all(self.slots, self.modes)).peak_bytes
        cell_bytes = max((kept_bytes - self.rank.static_bytes) // _CELLS, 1)
        cell = (budget_bytes - self.rank.static_bytes) // cell_bytes
        low_bytes = self.rank.static_bytes + (cell - 1) * cell_bytes
        walks = Walks(
            self.slots,
            self._points(),
            judge=lambda state: self._judge_peaks(make_plan([(self.slots, state)])),
            make_prices=self._make_prices,
            full_s_per_byte=self._count_full_s_per_byte(),
            is_over=lambda: time.monotonic() > self._deadline_s,
        )
        starts = [*usual, *self._list_loose(low_bytes), *self._list_even()]
        walks.run(starts, low_bytes=low_bytes, high_bytes=low_bytes + 2 * cell_bytes, simulations=simulations)
        # Without the peaks of stretches, which walks alone look at: they take far more memory than all else.
        plain = {key: (state, dataclasses.replace(one, peaks=None)) for key, (state, one) in walks.known.items()}
        self.learn({**plain, **self.knowledge})
        state = self._pick([found.state, *(state for state, _ in walks.known.values())], budget_bytes)
        return dataclasses.replace(found, state=state, verdict=self.judge(state))

    def improve_found(self, found: Found, budget_bytes: int, *, simulations: int) -> Found:
        """Return what moves make of `found`, with so many more simulations at most."""
        if self._is_done(found, budget_bytes):
            return found
        state = self.improve(found.state, budget_bytes, simulations=simulations)
        return dataclasses.replace(found, state=state, verdict=self.judge(state))

    def settle_found(self, found: Found, budget_bytes: int, *, simulations: int) -> Found:
        """Return a plan that is about as fast as `found`, and has the host do less, where it has to keep up with compute.

        Args:
            found: What is best by the simulator.
            budget_bytes: Of the device.
            simulations: That may be run for it at most.
        """
        if self._is_done(found, budget_bytes) or self.rank.host_pace is not HostPace.LAYER_AHEAD:
            return found
        longest_s = found.verdict.step_s * (1 + _ALIKE)
        known = [state for state, verdict in self.knowledge.values() if verdict.step_s <= longest_s]
        best = min(known, key=lambda state: self._score_host(state, budget_bytes))
        state = self.improve(best, budget_bytes, simulations=simulations, score=self._score_host)
        if self.judge(state).step_s > longest_s:
            state = best
        return dataclasses.replace(found, state=state, verdict=self.judge(state))

    def trim_found(self, found: Found, budget_bytes: int, *, simulations: int) -> Found:
        """Return `found` without those rows of its table that the budget holds without, and that save no time."""
        if self._is_done(found, budget_bytes):
            return found
        state, most = found.state, self.simulations + simulations
        for row in list_rows(state, self.slots):
            if self.simulations >= most or time.monotonic() > self._deadline_s:
                break
            fewer = drop_row(state, self.slots, self.modes, row, min_offloaded_numel=self.rank.min_offloaded_numel)
            if fewer is not None and self.score(fewer, budget_bytes) < self.score(state, budget_bytes):
                state = fewer
        return dataclasses.replace(found, state=state, verdict=self.judge(state))

    def _score_host(self, state: State, budget_bytes: int) -> tuple[float, ...]:
        """Return what a better plan has less of: as `score`, with what the host does in forward on the clock."""
        above_bytes, step_s, *rest = self.score(state, budget_bytes)
        pairs = zip(self.slots, state, strict=True)
        host_s = sum(count_host_s(slot.layer, one) * self._microbatches[slot.chunk] for slot, one in pairs)
        return (above_bytes, step_s + host_s, *rest)

    def _is_done(self, found: Found, budget_bytes: int) -> bool:
        """Return whether nothing can be better: all is kept, or all plans were simulated."""
        keeps_all = found.state == keep_all(self.slots, self.modes) and found.verdict.peak_bytes <= budget_bytes
        return keeps_all or self._tries_all

    def list_states(self) -> Iterator[State]:
        """Yield everything that the layers of the rank can do."""
        found = {kind: tuple(list_configurations(modes)) for kind, modes in self.modes.items()}
        return itertools.product(*(found[slot.layer.kind] for slot in self.slots))

    def improve(self, state: State, budget_bytes: int, *, simulations: int, score: Score | None = None) -> State:
        """Return the best state by `score` that moves lead to, until none makes it better or `simulations` more were run."""
        score = score or self.score
        most = self.simulations + simulations
        lowest = score(state, budget_bytes)
        while True:
            for move in itertools.chain.from_iterable(self._list_moves(state, budget_bytes, doubt) for doubt in _DOUBTS):
                if self.simulations >= most or time.monotonic() > self._deadline_s:
                    return state
                candidate = apply_move(state, move)
                candidate_score = score(candidate, budget_bytes)
                if candidate_score < lowest:
                    state, lowest = candidate, candidate_score
                    break
            else:
                return state

    def _make_found(self, state: State, program: ProgramResult | None = None, off_bytes: int = 0) -> Found:
        kept_s = self.judge(keep_all(self.slots, self.modes)).step_s
        # Of ranks that are equally slow the last digits decide which is bettered first.
        return Found(state=state, verdict=self._judge_to_digits(state), program=program, off_bytes=off_bytes, kept_s=kept_s)

    def _add_programs(self, states: list[State], budget_bytes: int, off_bytes: int) -> tuple[ProgramResult | None, int]:
        """Add to `states` what programs come to, each corrected by what the peak and the time of the one before were off."""
        first = last = None
        asked_bytes, price = budget_bytes - off_bytes, CopyPrice()
        can_watch_last, avoids_watched = self._can_watch_last(), False
        fits = False
        for number in range(self._limits.programs + _MORE_PROGRAMS if budget_bytes else 1):
            if number >= self._limits.programs and fits and not price.is_between:
                break
            result = self._solve(asked_bytes, price.s_per_byte, avoids_watched=avoids_watched)
            if result is None or time.monotonic() > self._deadline_s:
                break
            is_repeated = last is not None and result.chunks == last.chunks
            placed = [place_counts(result, self.slots, order) for order in Order]
            states += placed
            for one in placed:
                self._judge_to_digits(one)
            best = self._pick_promising(placed, budget_bytes)
            verdict = self._judge_to_digits(best)
            # The bound that counts is of a program without a price on copies.
            first, last, off_bytes = first or result, result, verdict.peak_bytes - result.peak_bytes
            above_bytes = verdict.peak_bytes - budget_bytes
            late_s = self.count_added_s(verdict) - result.added_s
            is_close = -budget_bytes // _CLOSE_PARTS <= above_bytes <= 0
            most_late_s = (_LATE_BESIDE_WATCHED_PARTS if can_watch_last else _LATE_PARTS) * verdict.step_s
            if late_s > most_late_s and can_watch_last and not avoids_watched:
                avoids_watched = True
            else:
                price.learn(late_s, self._count_moved_bytes(best), most_late_s=most_late_s)
            fits = fits or above_bytes <= 0
            if is_close and late_s <= most_late_s and not price.is_between:
                break
            if is_repeated and above_bytes <= 0:
                break
            if is_repeated:
                # What a plan keeps goes in steps of a layer: by so much less nothing else was found, so by twice as much.
                asked_bytes -= 2 * above_bytes
            elif not is_close:
                asked_bytes = min(budget_bytes - off_bytes, asked_bytes - above_bytes)
        return first, off_bytes

    def _pick_promising(self, states: Sequence[State], budget_bytes: int) -> State:
        """Return the best of `states`, or the fastest one where that is a little above the budget and much faster."""
        best = self._pick(states, budget_bytes)
        fastest = min(states, key=lambda state: self.judge(state).step_s)
        is_near = self.judge(fastest).peak_bytes <= budget_bytes * (1 + 1 / _CLOSE_PARTS)
        is_faster = self.judge(fastest).step_s < self.judge(best).step_s * (1 - _LATE_PARTS)
        return fastest if is_near and is_faster else best

    def _count_moved_bytes(self, state: State) -> int:
        """Return the bytes that leave in a step."""
        pairs = zip(self.slots, state, strict=True)
        return sum(configuration.moved_bytes * self._microbatches[slot.chunk] for slot, configuration in pairs)

    def _climb_ladders(self, budget_bytes: int, simulations: int) -> Iterator[State]:
        """Yield the lowest rung that fits of each plan by rule of thumb, while there are simulations for them."""
        if simulations <= 0:
            return
        most = self.simulations + simulations
        rungs = count_rungs(self.slots)
        loose = self._list_loose(budget_bytes)
        tightened = itertools.chain.from_iterable(list_tightened(state, self.slots, self.modes) for state in loose)
        for ladder in itertools.chain(tightened, list_ladders(self.slots, self.modes)):
            if self.simulations >= most or time.monotonic() > self._deadline_s:
                return
            fitting = (verdict for _, verdict in self.knowledge.values() if verdict.peak_bytes <= budget_bytes)
            fastest_s = min((verdict.step_s for verdict in fitting), default=math.inf)
            # Higher rungs take longer: what is slow and does not fit leads to nothing.
            is_slow = functools.partial(self._takes, fastest_s)
            state = find_lowest(ladder, rungs, functools.partial(self._fits, budget_bytes), is_hopeless=is_slow)
            if state is not None:
                yield state

    def _fits(self, budget_bytes: int, state: State) -> bool:
        return self.judge(state).peak_bytes <= budget_bytes

    def _takes(self, least_s: float, state: State) -> bool:
        return self.judge(state).step_s >= least_s

    def _list_loose(self, budget_bytes: int) -> Iterator[State]:
        """Yield what programs say of the next larger budgets of a scale that is the same for all budgets."""
        kept_bytes = self.judge(keep_all(self.slots, self.modes)).peak_bytes
        step_bytes = max((kept_bytes - self.rank.static_bytes) // _SCALE, 1)
        lowest = (budget_bytes - self.rank.static_bytes) // step_bytes + 1
        places = range(lowest, min(lowest + _LOOSER, _SCALE))
        unknown = [place for place in places if place not in self._loose]
        least_bytes = self.rank.static_bytes - self._held_bytes
        results = map_in_processes(lambda place: self._solve(least_bytes + place * step_bytes, 0.0), unknown)
        for place, result in zip(unknown, results, strict=True):
            self._loose[place] = [] if result is None else [place_counts(result, self.slots, order) for order in Order]
        for place in places:
            yield from self._loose[place]

    def _repair(self, states: Sequence[State], budget_bytes: int) -> State:
        """Return what moves make of the fastest state that is a little above the budget, where that is worth it."""
        best = self._pick(states, budget_bytes)
        most_bytes = budget_bytes * (1 + 1 / _CLOSE_PARTS)
        fits = self.judge(best).peak_bytes <= budget_bytes
        longest_s = self.judge(best).step_s * (1 - self._limits.gap) if fits else math.inf
        near = [state for state in states if budget_bytes < self.judge(state).peak_bytes <= most_bytes]
        near = [state for state in near if self.judge(state).step_s < longest_s]
        if not near:
            return best
        # The fastest of them may be far above the budget, the lowest hardly faster.
        fastest = min(near, key=lambda state: self.judge(state).step_s)
        lowest = min(near, key=lambda state: self.judge(state).peak_bytes)
        repaired = [self.improve(state, budget_bytes, simulations=_REPAIRS) for state in dict.fromkeys((fastest, lowest))]
        return self._pick([best, *repaired], budget_bytes)

    def _can_watch_last(self) -> bool:
        """Return whether ways that have the engine watch a last layer were measured beside others."""
        is_short = max((len(chunk.layers) for chunk in self.rank.chunks), default=0) <= SHORT_CHUNK
        return is_short and any(one.last != one.last_unwatched for one in self._points().values())

    def _solve(self, budget_bytes: int, moved_s_per_byte: float, *, avoids_watched: bool = False) -> ProgramResult | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        points = self._points()
        if avoids_watched:
            points = {kind: dataclasses.replace(one, last=one.last_unwatched) for kind, one in points.items()}
        result = None
        if budget_bytes > self.rank.static_bytes:
            result = solve_program(
                self.rank,
                points,
                budget_bytes=budget_bytes,
                moved_s_per_byte=moved_s_per_byte,
                gap=self._limits.gap,
                time_limit_s=left_s,
            )
        # Where nothing fits by its count, something may fit all the same: what has the least peak.
        return result or solve_program(self.rank, points, budget_bytes=None, gap=self._limits.gap, time_limit_s=left_s)

    def _pick(self, states: Iterable[State], budget_bytes: int) -> State:
        return min(states, key=lambda state: self.score(state, budget_bytes))

    def _list_moves(self, state: State, budget_bytes: int, doubt: float) -> Iterator[Move]:
        """Yield the moves from `state` that are worth a simulation, the most promising first.

        Args:
            state: What the layers do.
            budget_bytes: Of the device.
            doubt: One of `_DOUBTS`.
        """
        above_bytes = self.judge(state).peak_bytes - budget_bytes
        dynamic_bytes = max(self.judge(keep_all(self.slots, self.modes)).peak_bytes - self.rank.static_bytes, 1)
        order = functools.partial(order_moves, state, self.slots, above_bytes=above_bytes, doubt_bytes=doubt * dynamic_bytes)
        prices = self._make_prices(state, self.judge(state))
        ways = {kind: [point.configuration for point in points.every] for kind, points in self._points().items()}
        changes = list_changes(state, self.slots, ways, prices)
        yield from order([(change,) for change in changes])
        yield from list_swaps(state, self.slots, prices)
        yield from order(list_pairs(changes))

    def _list_even(self) -> Iterator[State]:
        """Yield the states in which all layers of a kind do the same, by rule of thumb."""
        ways = {kind: list_ways(modes) for kind, modes in self.modes.items()}
        for number in range(max((len(of_kind) for of_kind in ways.values()), default=0)):
            yield tuple(ways[slot.layer.kind][min(number, len(ways[slot.layer.kind]) - 1)] for slot in self.slots)

    def _count_full_s_per_byte(self) -> float:
        """Return the seconds that all layers take to run again for each byte that they save."""
        full_s = sum(slot.layer.forward_s * self._microbatches[slot.chunk] for slot in self.slots)
        return full_s / max(sum(slot.layer.saved_bytes * self._in_flight[slot.chunk] for slot in self.slots), 1)

    def _make_prices(self, state: State, verdict: Verdict) -> Prices:
        """Return what bytes and seconds come to, as `state`, of which that is known, and a plan that keeps all compare."""
        pairs = zip(self.slots, state, strict=True)
        recompute_s = sum(configuration.recompute_s * self._microbatches[slot.chunk] for slot, configuration in pairs)
        moved_bytes = self._count_moved_bytes(state)
        kept_s = self.judge(keep_all(self.slots, self.modes)).step_s
        longer_s = verdict.step_s - kept_s - recompute_s
        return Prices(
            in_flight=self._in_flight,
            microbatches=self._microbatches,
            s_per_byte=max(
                find_link_price(self.rank, self.slots, state), max(longer_s, 0.0) / moved_bytes if moved_bytes else 0.0
            ),
        )


def count_plans(slots: Iterable[LayerSlot], modes: Mapping[str, Sequence[Mode]]) -> int:
    """Return how many plans there are for the layers of a rank, by what each kind of them may choose from."""
    return math.prod(count_configurations(modes[slot.layer.kind]) for slot in slots)


def count_layer_passes(rank: RankModel) -> int:
    """Return the forwards and backwards of single layers in a simulation of a rank."""
    return sum(len(rank.chunks[one.chunk].layers) for one in rank.passes)


def _count_in_flight_at_peak(rank: RankModel) -> tuple[int, ...]:
    """Return how many microbatches are in flight by chunk where the layers together keep most."""
    sizes = [sum(layer.model.saved_bytes for layer in chunk.layers) for chunk in rank.chunks]
    vectors = [moment.in_flight for moment in list_moments(rank.passes, chunks=len(rank.chunks))]
    return max(vectors, key=lambda vector: sum(count * size for count, size in zip(vector, sizes, strict=True)))
