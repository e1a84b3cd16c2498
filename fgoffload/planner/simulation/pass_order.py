"""In which order simulated ranks run their passes: as those of a pipeline wait for each other, or one rank alone."""

import abc
import collections
from collections.abc import Sequence

from fgoffload.errors import ConfigError
from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.rank_run import RankRun
from fgoffload.planner.simulation.steady_state import RoundState


class PassOrder(abc.ABC):
    """When a pass may begin."""

    @abc.abstractmethod
    def run(
        self, runs: Sequence[RankRun], passes: Sequence[Sequence[Pass]], places: Sequence[Sequence[int]] = ()
    ) -> list[list[RoundState]]:
        """Run all passes of all ranks.

        Args:
            runs: The ranks.
            passes: Of each rank.
            places: Of each rank, after how many passes to look at it; none where nobody wants to know.

        Returns:
            The states at these places, by rank.

        Raises:
            ConfigError: Passes wait for each other.
        """


class Alone(PassOrder):
    """Each rank runs its passes one after the other."""

    def run(  # noqa: D102
        self, runs: Sequence[RankRun], passes: Sequence[Sequence[Pass]], places: Sequence[Sequence[int]] = ()
    ) -> list[list[RoundState]]:
        states: list[list[RoundState]] = [[] for _ in runs]
        for rank, run in enumerate(runs):
            for done, one in enumerate(passes[rank], start=1):
                run.run_pass(one, ready_s=0.0)
                if places and done in places[rank]:
                    states[rank].append(run.get_state())
        return states


class InPipeline(PassOrder):
    """A pass begins when the pass of the neighbour that makes its input is over.

    Args:
        chunks: Of each rank: chunk c of rank r is virtual stage c * p + r of p ranks.
        p2p_s: Seconds between the end of a pass and the start of what needs it.
    """

    def __init__(self, chunks: int, p2p_s: float) -> None:
        self._chunks = chunks
        self._p2p_s = p2p_s

    def run(  # noqa: D102
        self, runs: Sequence[RankRun], passes: Sequence[Sequence[Pass]], places: Sequence[Sequence[int]] = ()
    ) -> list[list[RoundState]]:
        stages = len(runs)
        last = stages * self._chunks - 1
        over = [0] * stages
        ends: dict[tuple[PassKind, int, int], float] = {}
        states: list[list[RoundState]] = [[] for _ in runs]
        waiting = collections.deque(range(stages))
        while waiting:
            rank = waiting.popleft()
            for one in passes[rank][over[rank] :]:
                stage = one.chunk * stages + rank
                ready_s = _find_ready(ends, one, stage, last)
                if ready_s is None:
                    break
                ends[one.kind, stage, one.microbatch] = runs[rank].run_pass(one, ready_s=ready_s) + self._p2p_s
                over[rank] += 1
                if places and over[rank] in places[rank]:
                    states[rank].append(runs[rank].get_state())
                follower = (stage + (1 if one.kind is PassKind.FORWARD else -1)) % stages
                if follower != rank:
                    waiting.append(follower)
        _check_all_ran(passes, over)
        return states


def _find_ready(ends: dict[tuple[PassKind, int, int], float], one: Pass, stage: int, last: int) -> float | None:
    """Return when the input of a pass of virtual stage `stage` is there, or None where that is not known yet."""
    if one.kind is PassKind.FORWARD:
        return 0.0 if stage == 0 else ends.get((PassKind.FORWARD, stage - 1, one.microbatch))
    return 0.0 if stage == last else ends.get((PassKind.BACKWARD, stage + 1, one.microbatch))


def _check_all_ran(passes: Sequence[Sequence[Pass]], over: Sequence[int]) -> None:
    for rank, (own, count) in enumerate(zip(passes, over, strict=True)):
        if count < len(own):
            raise ConfigError(
                f"rank {rank} waits for ever before {own[count]}: what it needs is on no other rank, or behind what waits for "
                "this one. Give all ranks the passes of one pipeline."
            )
