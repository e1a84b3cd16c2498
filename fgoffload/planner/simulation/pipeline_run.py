"""When each pass of a step may begin, and which rounds of it need not be simulated.

[Note: Rounds]
Between its first forwards and its last backwards a rank does the same over and over: the forwards and backwards of the next
group of microbatches through all chunks. Only about the first two of these rounds are simulated, and then the last passes. In
the rounds between each pass takes as long, and counts as much, as in the last round before them. How long ranks wait for each
other is found out for all passes: a rank that is a bit slower than its neighbours holds them up many rounds later.
"""

import dataclasses
import math
from collections.abc import Sequence

from fgoffload.errors import ConfigError
from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.rank_run import RankRun
from fgoffload.planner.simulation.tallies import NEIGHBOURS_PLACE

_FEWEST_ROUNDS = 1.5
"""Before those that are left out: the first half still has traces of the warm-up."""

_LEAST_MICROBATCHES = 4
"""Of a round."""

_FORWARD = PassKind.FORWARD
"""To look up a member of an enumeration takes Python as long as a call."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Which rounds are not simulated. See [Note: Rounds]."""

    places: tuple[int, ...]
    """By rank, the passes before those rounds."""
    passes: int
    """Of a round, on each rank."""
    microbatches: int
    """Of a round."""
    left_out: int
    """How many."""


def find_rounds(passes_by_rank: Sequence[Sequence[Pass]], chunks: int, *, are_all_simulated: bool) -> Rounds:
    """Return which rounds need not be simulated.

    Args:
        passes_by_rank: What each rank runs.
        chunks: Of each rank.
        are_all_simulated: Whether none are left out.
    """
    group = _count_group(passes_by_rank[0]) if chunks > 1 else len(passes_by_rank)
    microbatches = group * math.ceil(_LEAST_MICROBATCHES / max(group, 1))
    length = 2 * microbatches * chunks
    starts = [_find_start(passes) for passes in passes_by_rank]
    alike = min(
        _count_alike(passes[start:], length, microbatches) for passes, start in zip(passes_by_rank, starts, strict=True)
    )
    # What comes again after a round is one round less than all that repeats.
    left_out = 0 if are_all_simulated else max(0, int((alike + length) / length - _FEWEST_ROUNDS))
    places = tuple(start + alike + length - left_out * length for start in starts)
    return Rounds(places=places, passes=length, microbatches=microbatches, left_out=left_out)


def _find_start(passes: Sequence[Pass]) -> int:
    """Return the passes before the first forward that a backward follows."""
    return max(0, next((place for place, one in enumerate(passes) if one.kind is not _FORWARD), len(passes)) - 1)


def _count_group(passes: Sequence[Pass]) -> int:
    """Return how many microbatches go through the first chunk before another chunk has its turn."""
    return next((place for place, one in enumerate(passes) if one.chunk or one.kind is not _FORWARD), len(passes))


def _count_alike(passes: Sequence[Pass], length: int, microbatches: int) -> int:
    """Return how many passes come again after a round of `length` passes, with other microbatches."""
    later = passes[length:]
    for place, (one, other) in enumerate(zip(passes, later, strict=False)):
        if other.microbatch != one.microbatch + microbatches or other.kind is not one.kind or other.chunk != one.chunk:
            return place
    return len(later)


class PipelineRun:
    """Ranks in the middle of a step: a pass begins when the pass of the neighbour that makes its input is over.

    Args:
        runs: The ranks. Chunk c of rank r is virtual stage c * p + r of p ranks.
        passes_by_rank: What each runs, in order.
        chunks: Of each rank.
        p2p_s: Seconds between the end of a pass and the start of what needs it.
        rounds: Which are not simulated.
    """

    def __init__(
        self, runs: Sequence[RankRun], passes_by_rank: Sequence[Sequence[Pass]], *, chunks: int, p2p_s: float, rounds: Rounds
    ) -> None:
        self._runs = runs
        self._passes = passes_by_rank
        self._p2p_s = p2p_s
        self._rounds = rounds
        self._over = [0] * len(runs)
        """Passes, by rank."""
        self._busy_s: list[list[float]] = [[] for _ in runs]
        """By rank, how long each pass took before the rounds that are not simulated."""
        self._numbers: list[list[list[float]]] = [[] for _ in runs]
        """By rank, what was counted before and behind the last of these passes that are a round."""
        self._later_s = [0.0] * len(runs)
        """By rank, what rounds took that were not simulated: its clock knows nothing of them."""
        self._waited_s = [0.0] * len(runs)
        """By rank, how much of that it waited."""
        # By virtual stage. Nothing is waited for by the first stage's forwards and the last one's backwards.
        forwards: list[dict[int, float]] = [{} for _ in range(len(runs) * chunks)]
        backwards: list[dict[int, float]] = [{} for _ in forwards]
        pairs = ([*backwards[1:], None], backwards), ([None, *forwards[:-1]], forwards)
        self._ends_s = [
            [list(zip(needed[rank :: len(runs)], made[rank :: len(runs)], strict=True)) for needed, made in pairs]
            for rank in range(len(runs))
        ]
        """By rank, direction and chunk: when passes that it waits for were over, and its own, by microbatch."""

    def run(self) -> list[list[float] | None]:
        """Run all passes, and return by rank what is counted in the rounds that are not simulated.

        Raises:
            ConfigError: Passes wait for each other.
        """
        before = -1
        # From the first rank to the last, as forwards go, until none gets any further.
        while before < sum(self._over):
            before = sum(self._over)
            for rank in range(len(self._runs)):
                self._run_rank(rank)
        for rank, (own, count) in enumerate(zip(self._passes, self._over, strict=True)):
            if count < len(own):
                raise ConfigError(
                    f"rank {rank} waits for ever before {own[count]}: what it needs is on no other rank, or behind what waits "
                    "for this one. Give all ranks the passes of one pipeline."
                )
        return [self._count_left_out(rank) for rank in range(len(self._runs))]

    def _run_rank(self, rank: int) -> None:
        """Let one rank run until all its passes are over, or until it has to wait."""
        own, over, ends_s, rounds = self._passes[rank], self._over[rank], self._ends_s[rank], self._rounds
        first = rounds.places[rank]
        last = first + rounds.left_out * rounds.passes
        while over < len(own):
            one = own[over]
            needed, made = ends_s[one.kind is _FORWARD][one.chunk]
            ready_s = 0.0 if needed is None else needed.get(one.microbatch)
            if ready_s is None:
                break
            if first <= over < last:
                end_s = self._repeat(rank, (over - first) % rounds.passes, ready_s)
            else:
                end_s = self._simulate(rank, one, over, ready_s)
            made[one.microbatch] = end_s + self._p2p_s
            over += 1
        self._over[rank] = over

    def _simulate(self, rank: int, one: Pass, place: int, ready_s: float) -> float:
        """Run the pass at `place` of a rank, and return when it is over."""
        run, rounds, later_s = self._runs[rank], self._rounds, self._later_s[rank]
        first = rounds.places[rank]
        if place == first - rounds.passes:
            self._numbers[rank].append(run.list_numbers())
        start_s = max(run.clock_s, ready_s - later_s)
        # Behind the rounds that are not simulated, microbatches take the places of those in them.
        microbatch = one.microbatch - (rounds.left_out * rounds.microbatches if place >= first else 0)
        run.run_pass(one, microbatch, ready_s=start_s)
        if place < first:
            self._busy_s[rank].append(run.clock_s - start_s)
        if place == first - 1:
            self._numbers[rank].append(run.list_numbers())
        return run.clock_s + later_s

    def _repeat(self, rank: int, place: int, ready_s: float) -> float:
        """Let the pass at `place` of a round take as long as in the last simulated round, and return when it is over."""
        clock_s = self._runs[rank].clock_s + self._later_s[rank]
        waits_s = max(0.0, ready_s - clock_s)
        own_s = waits_s + self._busy_s[rank][place - self._rounds.passes]
        self._waited_s[rank] += waits_s
        self._later_s[rank] += own_s
        return clock_s + own_s

    def _count_left_out(self, rank: int) -> list[float] | None:
        """Return what a rank counts in the rounds that are not simulated, or None where all are."""
        if not self._rounds.left_out:
            return None
        numbers = [self._rounds.left_out * (after - before) for before, after in zip(*self._numbers[rank], strict=True)]
        numbers[0], numbers[1 + NEIGHBOURS_PLACE] = self._later_s[rank], self._waited_s[rank]
        return numbers
