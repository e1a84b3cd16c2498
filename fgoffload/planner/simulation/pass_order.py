"""In which order simulated ranks run their passes: as those of a pipeline wait for each other, or one rank alone."""

import abc
import functools
import math
import operator
from collections.abc import Sequence

from fgoffload.errors import ConfigError
from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.link_queue import SAME_MOMENT
from fgoffload.planner.simulation.rank_run import RankRun, RoundState

_FORWARD = PassKind.FORWARD
"""To look up a member of an enumeration takes Python as long as a call."""


class PassOrder(abc.ABC):
    """Ranks in the middle of a step, and when each of their passes may begin.

    Args:
        runs: The ranks.
        passes: Of each rank, in order.
        marks: Of each rank, after how many passes to look at it; none where nobody wants to know.
    """

    def __init__(self, runs: Sequence[RankRun], passes: Sequence[Sequence[Pass]], marks: Sequence[Sequence[int]] = ()) -> None:
        self.over = [0] * len(runs)
        """Of each rank, how many passes are over."""
        self.states: list[dict[int, RoundState]] = [{} for _ in runs]
        """Of each rank, what was seen at its marks."""
        self._runs = runs
        self._passes = list(passes)
        self._marks = [frozenset(own) for own in marks] or [frozenset()] * len(runs)

    @functools.cached_property
    def _passes_called(self) -> dict[tuple[bool, int], list[Pass]]:
        """By whether it is a forward and by chunk, the pass of each microbatch: those of all ranks are called alike.

        They are looked up by the ten thousand, for what it takes to make a tenth as many.
        """
        found: dict[tuple[bool, int], list[Pass]] = {}
        for one in sorted(self._passes[0], key=operator.attrgetter("microbatch")):
            found.setdefault((one.kind is _FORWARD, one.chunk), []).append(one)
        return found

    @abc.abstractmethod
    def run_until(self, limits: Sequence[int]) -> None:
        """Let each rank run until so many of its passes are over, or until it has to wait for another that is there.

        Args:
            limits: By rank.
        """

    def run(self) -> None:
        """Run all passes that are left.

        Raises:
            ConfigError: Passes wait for each other.
        """
        self.run_until([len(own) for own in self._passes])
        for rank, (own, count) in enumerate(zip(self._passes, self.over, strict=True)):
            if count < len(own):
                raise ConfigError(
                    f"rank {rank} waits for ever before {own[count]}: what it needs is on no other rank, or behind what waits "
                    "for this one. Give all ranks the passes of one pipeline."
                )

    def leave_out(self, passes: int, microbatches: int, later_s: Sequence[float]) -> None:
        """Leave out the next passes of each rank, which are whole rounds.

        Args:
            passes: How many, of each rank.
            microbatches: How many go through all chunks in them. Those behind are called as if they came now.
            later_s: By rank, how much longer than those of the first rank they would have taken.
        """
        for rank, own in enumerate(self._passes):
            behind, called = own[self.over[rank] + passes :], self._passes_called
            renumbered = [called[one.kind is _FORWARD, one.chunk][one.microbatch - microbatches] for one in behind]
            self._passes[rank] = (*own[: self.over[rank]], *renumbered)
            self._runs[rank].leave_out(microbatches)
        self._shift(later_s)

    @abc.abstractmethod
    def list_margins(self, rank: int) -> list[tuple[int, float]]:
        """Return the neighbours that a rank may have to wait for, and how long its input from them lay there at least.

        That is since the last mark but one, in seconds; below 0 where the rank had to wait.
        """

    @abc.abstractmethod
    def list_made_s(self, places: Sequence[int], at_s: Sequence[float], most: int) -> list[float]:
        """Return when input was made that ranks had not used, in seconds beside the one that made it.

        Args:
            places: By rank, after how many passes. None of them is before rounds that were left out.
            at_s: By rank, its clock then.
            most: How many passes of a rank behind its place may have input.
        """

    @abc.abstractmethod
    def _shift(self, later_s: Sequence[float]) -> None:
        """Let each rank be so much later, beside the others, than it was."""


class Alone(PassOrder):
    """Each rank runs its passes one after the other."""

    def run_until(self, limits: Sequence[int]) -> None:  # noqa: D102
        for rank, run in enumerate(self._runs):
            for one in self._passes[rank][self.over[rank] : limits[rank]]:
                run.run_pass(one, ready_s=0.0)
                self.over[rank] += 1
                if self.over[rank] in self._marks[rank]:
                    self.states[rank][self.over[rank]] = run.get_state()

    def list_margins(self, rank: int) -> list[tuple[int, float]]:  # noqa: D102
        return []

    def list_made_s(self, places: Sequence[int], at_s: Sequence[float], most: int) -> list[float]:  # noqa: D102
        return []

    def _shift(self, later_s: Sequence[float]) -> None:
        pass


class InPipeline(PassOrder):
    """A pass begins when the pass of the neighbour that makes its input is over.

    Args:
        runs: The ranks.
        passes: Of each rank, in order.
        marks: Of each rank, after how many passes to look at it.
        chunks: Of each rank: chunk c of rank r is virtual stage c * p + r of p ranks.
        p2p_s: Seconds between the end of a pass and the start of what needs it.
    """

    def __init__(
        self,
        runs: Sequence[RankRun],
        passes: Sequence[Sequence[Pass]],
        marks: Sequence[Sequence[int]] = (),
        *,
        chunks: int,
        p2p_s: float,
    ) -> None:
        super().__init__(runs, passes, marks)
        self._p2p_s = p2p_s
        # By virtual stage. Nothing is waited for by the first stage's forwards and the last one's backwards.
        forwards: list[dict[int, float]] = [{} for _ in range(len(runs) * chunks)]
        backwards: list[dict[int, float]] = [{} for _ in forwards]
        forward_pairs = list(zip([None, *forwards[:-1]], forwards, strict=True))
        backward_pairs = list(zip([*backwards[1:], None], backwards, strict=True))
        self._forward_ends = [forward_pairs[rank :: len(runs)] for rank in range(len(runs))]
        """By rank and chunk, each by microbatch: when forwards of the stage before were over, and when its own were."""
        self._backward_ends = [backward_pairs[rank :: len(runs)] for rank in range(len(runs))]
        """By rank and chunk, each by microbatch: when backwards of the stage behind were over, and when its own were."""
        self._shifts_s = [0.0] * len(runs)
        """By rank, how much later than its clock says it is, beside the first rank, for the rounds that were left out."""
        self._awaited: list[tuple[dict[int, float] | None, int]] = [(None, 0)] * len(runs)
        """By rank, what its next pass needs, where that was not there when it was looked for: the ends and the microbatch."""
        self._margins_s = [[math.inf, math.inf] for _ in runs]
        """By rank, how long the input of its backwards and of its forwards lay there at least, since its last mark."""
        self._former_margins_s = [[math.inf, math.inf] for _ in runs]
        """The same, between the two marks before."""

    def run_until(self, limits: Sequence[int]) -> None:  # noqa: D102
        before = -1
        # From the first rank to the last, as forwards go, until none gets any further.
        while before < sum(self.over):
            before = sum(self.over)
            for rank, limit in enumerate(limits):
                ends, microbatch = self._awaited[rank]
                if self.over[rank] < limit and (ends is None or microbatch in ends):
                    self._run_rank(rank, limit)

    def _run_rank(self, rank: int, limit: int) -> None:
        """Let one rank run until `limit` of its passes are over, or until it has to wait."""
        run, own, marks = self._runs[rank], self._passes[rank], self._marks[rank]
        forwards, backwards = self._forward_ends[rank], self._backward_ends[rank]
        shift_s, margins_s, over = self._shifts_s[rank], self._margins_s[rank], self.over[rank]
        while over < limit:
            one = own[over]
            is_forward = one.kind is _FORWARD
            needed, made = (forwards if is_forward else backwards)[one.chunk]
            ready_s = -math.inf if needed is None else needed.get(one.microbatch)
            if ready_s is None:
                self._awaited[rank] = (needed, one.microbatch)
                break
            ready_s -= shift_s
            margin_s = run.clock_s - ready_s
            if margin_s < margins_s[is_forward]:
                margins_s[is_forward] = margin_s
            made[one.microbatch] = run.run_pass(one, ready_s=ready_s) + shift_s + self._p2p_s
            over += 1
            if over in marks:
                self.states[rank][over] = run.get_state()
                self._former_margins_s[rank] = margins_s
                self._margins_s[rank] = margins_s = [math.inf, math.inf]
        else:
            self._awaited[rank] = (None, 0)
        self.over[rank] = over

    def list_margins(self, rank: int) -> list[tuple[int, float]]:  # noqa: D102
        backward_s, forward_s = map(min, self._margins_s[rank], self._former_margins_s[rank])
        ranks = len(self._runs)
        return [((rank + 1) % ranks, backward_s), ((rank - 1) % ranks, forward_s)]

    def list_made_s(self, places: Sequence[int], at_s: Sequence[float], most: int) -> list[float]:  # noqa: D102
        found, ranks = [], len(self._runs)
        clocks_s = [one_s + shift_s for one_s, shift_s in zip(at_s, self._shifts_s, strict=True)]
        for rank, place in enumerate(places):
            for one in self._passes[rank][place : place + most]:
                is_forward = one.kind is _FORWARD
                needed, _ = (self._forward_ends if is_forward else self._backward_ends)[rank][one.chunk]
                end_s = None if needed is None else needed.get(one.microbatch)
                since_s = clocks_s[(rank + (-1 if is_forward else 1)) % ranks]
                if end_s is not None and end_s - self._p2p_s <= since_s * SAME_MOMENT:
                    found.append(end_s - since_s)
        return found

    def _shift(self, later_s: Sequence[float]) -> None:
        self._awaited = [(None, 0)] * len(self._runs)  # microbatches have other numbers now
        for rank, shift_s in enumerate(later_s):
            self._shifts_s[rank] += shift_s
            # What was made and is not used yet is made later too: in the last of the rounds that were left out.
            for _, ends in (*self._forward_ends[rank], *self._backward_ends[rank]):
                for microbatch in ends:
                    ends[microbatch] += shift_s
