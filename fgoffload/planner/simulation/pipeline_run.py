"""Runs the passes of a step on all ranks, and extrapolates repeated rounds instead of simulating them.

[Note: Rounds]
Between warm-up and drain, a rank repeats rounds. In each round, the next few microbatches run forward and backward through all
chunks. We simulate about two rounds: more than one at the start, and the rest before the drain. The rounds in between are
skipped: they reuse the times and counters of the last simulated round before them. We compute waits between ranks for all
passes, because it can take many rounds until a slightly slower rank delays its neighbors.
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
"""Minimum number of simulated rounds, in total and at the start. The first round still includes part of the warm-up."""

_LEAST_MICROBATCHES = 4  # minimum number of microbatches in a round
_FORWARD = PassKind.FORWARD  # cached: looking up an enum member costs as much as a call


class Rounds(NamedTuple):
    """The skipped rounds. See [Note: Rounds]."""

    places: Sequence[int]  # for each rank, number of passes before the skipped rounds
    passes: int  # number of passes in a round, on each rank
    microbatches: int  # number of microbatches in a round
    skipped: int  # number of skipped rounds


def find_rounds(passes_by_rank: Sequence[Sequence[Pass]], chunks: int, *, are_all_simulated: bool) -> Rounds:
    """Return the rounds that can be skipped."""
    # With several chunks, a group of microbatches runs through one chunk before it enters the next.
    own = passes_by_rank[0]
    in_turn = next((place for place, one in enumerate(own) if one.chunk or one.kind is not _FORWARD), len(own))
    group = in_turn if chunks > 1 else len(passes_by_rank)
    microbatches = group * math.ceil(_LEAST_MICROBATCHES / max(group, 1))
    length = 2 * microbatches * chunks
    starts = [_find_start(passes) for passes in passes_by_rank]
    alike = min(_count_alike(passes, start, length, microbatches) for passes, start in zip(passes_by_rank, starts, strict=True))
    # `alike` counts only passes that recur later, so it excludes the last round.
    skipped = 0 if are_all_simulated else max(0, int((alike + length) / length - _FEWEST_ROUNDS))
    kept = alike + length - skipped * length
    at_start = max(math.ceil(_FEWEST_AT_START * length), kept - length)
    return Rounds([start + at_start for start in starts], length, microbatches, skipped)


def _find_start(passes: Sequence[Pass]) -> int:
    """Return the number of passes before the first forward that is directly followed by a backward."""
    return max(0, next((place for place, one in enumerate(passes) if one.kind is not _FORWARD), len(passes)) - 1)


def _count_alike(passes: Sequence[Pass], start: int, length: int, microbatches: int) -> int:
    """Return how many passes in a row, from `start` on, recur `length` passes later with later microbatches."""
    later = passes[start + length :]
    for place, (one, other) in enumerate(zip(passes[start:], later, strict=False)):
        if other.microbatch != one.microbatch + microbatches or other.kind is not one.kind or other.chunk != one.chunk:
            return place
    return len(later)


class RankPasses:
    """Runs the passes of one rank until it needs an input that another rank has not produced yet.

    `ends_s` contains the end of each pass, keyed by direction (true for forward), virtual stage and microbatch. `stages` is a
    pair: the virtual stage of each chunk, and the number of virtual stages. `place` is the rank's entry in `Rounds.places`.
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
        self.done = 0  # number of completed passes
        self.passes = passes
        self._run = run
        self._ends_s = ends_s
        self._stages, count = stages
        self._last_stage = count - 1
        self._first = place
        self._rounds = rounds
        self._busy_s: list[float] = []  # busy seconds of the passes before the skipped rounds
        self._numbers: list[list[float]] = []  # counters at the start and end of the last round before the skipped ones
        self._skipped_s = self._skipped_waits_s = 0.0
        """Seconds of the skipped rounds, and how many of them are waits. The clock of `run` excludes these seconds."""

    def run_on(self) -> None:
        """Run passes until all are done or the next one lacks its input."""
        run, ends_s, first, length = self._run, self._ends_s, self._first, self._rounds.passes
        last = first + self._rounds.skipped * length
        while self.done < len(self.passes):
            one = self.passes[self.done]
            is_forward, stage, microbatch = one.kind is _FORWARD, self._stages[one.chunk], one.microbatch
            # Forwards of the first stage and backwards of the last stage need no input from another rank.
            is_free = stage == (0 if is_forward else self._last_stage)
            ready_s = 0.0 if is_free else ends_s.get((is_forward, stage - 1 if is_forward else stage + 1, microbatch))
            if ready_s is None:
                return
            if first <= self.done < last:
                # The pass takes as long as in the last simulated round.
                waits_s = max(0.0, ready_s - run.clock_s - self._skipped_s)
                self._skipped_waits_s += waits_s
                self._skipped_s += waits_s + self._busy_s[(self.done - first) % length - length]
            else:
                self._simulate(one, ready_s)
            ends_s[is_forward, stage, microbatch] = run.clock_s + self._skipped_s
            self.done += 1

    def _simulate(self, one: Pass, ready_s: float) -> None:
        run, rounds, place = self._run, self._rounds, self.done
        if place == self._first - rounds.passes:
            self._numbers.append(run.list_numbers())
        start_s = max(run.clock_s, ready_s - self._skipped_s)
        # After the skipped rounds, microbatches are renumbered as if those rounds did not exist.
        skipped = rounds.skipped * rounds.microbatches if place >= self._first else 0
        run.run_pass(one, one.microbatch - skipped, start_s, self._find_following(one, skipped))
        if place < self._first:
            self._busy_s.append(run.clock_s - start_s)
        if place == self._first - 1:
            self._numbers.append(run.list_numbers())

    def _find_following(self, one: Pass, skipped: int) -> tuple[int, int] | None:
        """Return the chunk and microbatch of the next backward, or None if the engine's `PassOrder` does not predict it.

        After a forward, `PassOrder` predicts only a backward that follows directly. After a backward, one forward may come in
        between. `PassOrder` ignores backwards without offloaded tensors.
        """
        may_be_forward = one.kind is not _FORWARD
        for place in range(self.done + 1, len(self.passes)):
            later = self.passes[place]
            if later.kind is not _FORWARD:
                if self._run.has_groups(later.chunk):
                    return later.chunk, later.microbatch - skipped
            elif may_be_forward:
                may_be_forward = False
            else:
                break
        return None

    def finish(self) -> RankResult:
        """Return the result of the whole step, including the skipped rounds."""
        if not self._rounds.skipped:
            return self._run.finish(None)
        counted = [self._rounds.skipped * (after - before) for before, after in zip(*self._numbers, strict=True)]
        counted[0], counted[NEIGHBOURS_PLACE] = self._skipped_s, self._skipped_waits_s
        return self._run.finish(counted)


def run_pipeline(
    runs: Sequence[RankRun], passes_by_rank: Sequence[Sequence[Pass]], *, chunks: int, rounds: Rounds
) -> tuple[RankResult, ...]:
    """Simulate all ranks. A pass starts once the neighboring rank has produced its input."""
    ends_s: dict[tuple[bool, int, int], float] = {}
    count = len(runs) * chunks
    ranks = [
        RankPasses(run, passes, ends_s, (range(rank, count, len(runs)), count), place=place, rounds=rounds)
        for rank, (run, passes, place) in enumerate(zip(runs, passes_by_rank, rounds.places, strict=True))
    ]
    before = -1
    # Visit ranks in the order of forwards, then in the order of backwards, until no rank advances.
    while before < (before := sum(rank.done for rank in ranks)):
        for rank in (*ranks, *reversed(ranks)):
            rank.run_on()
    for number, rank in enumerate(ranks):
        if rank.done < len(rank.passes):
            raise ConfigError(
                f"rank {number} deadlocks before {rank.passes[rank.done]}: no rank produces the input, or the rank that "
                "does is waiting for this one. Use ranks whose passes belong to the same pipeline schedule."
            )
    return tuple(rank.finish() for rank in ranks)
