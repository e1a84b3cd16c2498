"""Runs the passes of a step on all ranks, and extrapolates repeated rounds instead of simulating them.

[Note: Rounds]
Between its first forwards and its last backwards a rank repeats rounds: forwards and backwards of the next group of
microbatches through all chunks. We simulate about two rounds: more than one at the start, and the rest before the last passes.
The passes in between get the time and the counters of the last round before them. Waits between ranks are computed for all
passes, since a slightly slower rank delays its neighbours many rounds later.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fgoffload.errors import ConfigError
from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.rank_clock import NEIGHBOURS_PLACE
from fgoffload.planner.simulation.rank_run import RankRun
from fgoffload.planner.simulation.simulation_result import RankResult

_FEWEST_ROUNDS, _FEWEST_AT_START = 1.5, 1.25
"""Minimum number of simulated rounds, in total and at the start. The first one still includes warm-up."""

_LEAST_MICROBATCHES = 4  # minimum number of microbatches in a round
_FORWARD = PassKind.FORWARD  # cached: looking up an enum member costs as much as a call


class Rounds(NamedTuple):
    """The rounds that are extrapolated. See [Note: Rounds]."""

    places: Sequence[int]  # number of passes before those rounds, by rank
    passes: int  # passes of a round on each rank
    microbatches: int  # microbatches of a round
    left_out: int  # number of extrapolated rounds


def find_rounds(passes_by_rank: Sequence[Sequence[Pass]], chunks: int, *, are_all_simulated: bool) -> Rounds:
    """Return the rounds that can be extrapolated."""
    # With several chunks a group of microbatches runs through the first one before the next.
    own = passes_by_rank[0]
    in_turn = next((place for place, one in enumerate(own) if one.chunk or one.kind is not _FORWARD), len(own))
    group = in_turn if chunks > 1 else len(passes_by_rank)
    microbatches = group * math.ceil(_LEAST_MICROBATCHES / max(group, 1))
    length = 2 * microbatches * chunks
    starts = [_find_start(passes) for passes in passes_by_rank]
    alike = min(_count_alike(passes, start, length, microbatches) for passes, start in zip(passes_by_rank, starts, strict=True))
    # `alike` counts the passes that repeat an earlier one, so it lacks the first round.
    left_out = 0 if are_all_simulated else max(0, int((alike + length) / length - _FEWEST_ROUNDS))
    kept = alike + length - left_out * length
    at_start = max(math.ceil(_FEWEST_AT_START * length), kept - length)
    return Rounds([start + at_start for start in starts], length, microbatches, left_out)


def _find_start(passes: Sequence[Pass]) -> int:
    """Return the number of passes before the first forward that is directly followed by a backward."""
    return max(0, next((place for place, one in enumerate(passes) if one.kind is not _FORWARD), len(passes)) - 1)


def _count_alike(passes: Sequence[Pass], start: int, length: int, microbatches: int) -> int:
    """Return how many passes from `start` on recur `length` passes later, with later microbatches."""
    later = passes[start + length :]
    for place, (one, other) in enumerate(zip(passes[start:], later, strict=False)):
        if other.microbatch != one.microbatch + microbatches or other.kind is not one.kind or other.chunk != one.chunk:
            return place
    return len(later)


class RankPasses:
    """Runs the passes of one rank, as far as other ranks have delivered its inputs.

    `ends_s` has the arrival times of all outputs at the neighbours, by direction, virtual stage and microbatch. `stages` has
    the virtual stage of each chunk, and the number of stages; `place` is the number of passes before the extrapolated rounds.
    """

    def __init__(
        self,
        run: RankRun,
        passes: Sequence[Pass],
        ends_s: dict[tuple[bool, int, int], float],
        stages: tuple[Sequence[int], int],
        *,
        place: int,
        rounds: Rounds,
    ) -> None:
        self.over = 0  # number of passes done
        self.passes = passes
        self._run = run
        self._ends_s = ends_s
        self._stages, count = stages
        self._last_stage = count - 1
        self._first = place
        self._rounds = rounds
        self._busy_s: list[float] = []  # busy seconds of the passes before the extrapolated rounds
        self._numbers: list[list[float]] = []  # counters before and after the last simulated round
        self._later_s = self._waited_s = 0.0
        """Seconds of the extrapolated rounds, which the clock of `run` does not include, and the waits in them."""

    def run_on(self) -> None:
        """Run passes until all are done or the next one must wait."""
        run, ends_s, first, length = self._run, self._ends_s, self._first, self._rounds.passes
        last = first + self._rounds.left_out * length
        while self.over < len(self.passes):
            one = self.passes[self.over]
            is_forward, stage, microbatch = one.kind is _FORWARD, self._stages[one.chunk], one.microbatch
            # Forwards of the first stage and backwards of the last one need no input from another rank.
            is_free = stage == (0 if is_forward else self._last_stage)
            ready_s = 0.0 if is_free else ends_s.get((is_forward, stage - 1 if is_forward else stage + 1, microbatch))
            if ready_s is None:
                return
            if first <= self.over < last:
                # The pass takes as long as in the last simulated round.
                waits_s = max(0.0, ready_s - run.clock_s - self._later_s)
                self._waited_s += waits_s
                self._later_s += waits_s + self._busy_s[(self.over - first) % length - length]
            else:
                self._simulate(one, ready_s)
            ends_s[is_forward, stage, microbatch] = run.clock_s + self._later_s
            self.over += 1

    def _simulate(self, one: Pass, ready_s: float) -> None:
        run, rounds, place = self._run, self._rounds, self.over
        if place == self._first - rounds.passes:
            self._numbers.append(run.list_numbers())
        start_s = max(run.clock_s, ready_s - self._later_s)
        # After the extrapolated rounds, later microbatches take the places of the extrapolated ones.
        left_out = rounds.left_out * rounds.microbatches if place >= self._first else 0
        run.run_pass(one, one.microbatch - left_out, start_s, self._find_following(one, left_out))
        if place < self._first:
            self._busy_s.append(run.clock_s - start_s)
        if place == self._first - 1:
            self._numbers.append(run.list_numbers())

    def _find_following(self, one: Pass, left_out: int) -> tuple[int, int] | None:
        """Return chunk and microbatch of the next backward, as far as the engine's `PassOrder` knows it.

        After a forward, this is the very next pass; after a backward, at most one forward may come in between. The engine does
        not notice backwards without offloaded tensors.
        """
        may_be_forward = one.kind is not _FORWARD
        for place in range(self.over + 1, len(self.passes)):
            later = self.passes[place]
            if later.kind is not _FORWARD:
                if self._run.has_groups(later.chunk):
                    return later.chunk, later.microbatch - left_out
            elif may_be_forward:
                may_be_forward = False
            else:
                break
        return None

    def finish(self) -> RankResult:
        """Return the result of the step."""
        if not self._rounds.left_out:
            return self._run.finish(None)
        counted = [self._rounds.left_out * (after - before) for before, after in zip(*self._numbers, strict=True)]
        counted[0], counted[NEIGHBOURS_PLACE] = self._later_s, self._waited_s
        return self._run.finish(counted)


def run_pipeline(
    runs: Sequence[RankRun], passes_by_rank: Sequence[Sequence[Pass]], *, chunks: int, rounds: Rounds
) -> tuple[RankResult, ...]:
    """Simulate all ranks. A pass starts once the neighbouring rank has produced its input.

    Chunk c of rank r is virtual stage c * p + r of p ranks.
    """
    ends_s: dict[tuple[bool, int, int], float] = {}
    count = len(runs) * chunks
    ranks = [
        RankPasses(run, passes, ends_s, (range(rank, count, len(runs)), count), place=place, rounds=rounds)
        for rank, (run, passes, place) in enumerate(zip(runs, passes_by_rank, rounds.places, strict=True))
    ]
    before = -1
    # Visits ranks first to last, as forwards run, then last to first, as backwards run, until no rank advances.
    while before < (before := sum(rank.over for rank in ranks)):
        for rank in (*ranks, *reversed(ranks)):
            rank.run_on()
    for number, rank in enumerate(ranks):
        if rank.over < len(rank.passes):
            raise ConfigError(
                f"rank {number} deadlocks before {rank.passes[rank.over]}: no rank produces its input, or that rank "
                "waits for this one. All ranks must have the passes of one pipeline."
            )
    return tuple(rank.finish() for rank in ranks)
