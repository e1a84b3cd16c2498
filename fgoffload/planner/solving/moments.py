"""When the memory of a rank may be at its peak: how many microbatches of each chunk are in flight, and which pass begins.

A step of hundreds of passes has a dozen such moments that matter, whatever a plan does.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import Pass, PassKind

_KNOWN_STEPS = 64
"""Each program of a rank asks for the moments of its step again."""

Way = tuple[PassKind, int]
"""Forward or backward, and through which chunk."""


class Gap(NamedTuple):
    """Between two passes that follow each other; before the first one, and after the last, one side is None."""

    before: Way | None
    """What ends."""
    after: Way | None
    """What begins."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A place of the schedule where memory may be at its peak: between two passes."""

    in_flight: tuple[int, ...]
    """Microbatches whose forward ended and whose backward did not, by chunk."""
    gap: Gap
    """What ended, and what begins."""


def list_moments(passes: Sequence[Pass], *, chunks: int) -> tuple[Moment, ...]:
    """Return where memory may be at its peak: behind each kind of forward and before each kind of backward.

    Of moments between the same two passes those are left out that take no more than others, whatever each chunk keeps.

    Args:
        passes: Of a step, in order.
        chunks: Of the rank.
    """
    return _list_moments(tuple(passes), chunks)


@functools.lru_cache(maxsize=_KNOWN_STEPS)
def _list_moments(passes: tuple[Pass, ...], chunks: int) -> tuple[Moment, ...]:
    by_gap: dict[Gap, set[tuple[int, ...]]] = {}
    for gap, in_flight in _list_places(passes, chunks):
        # Between a backward and a forward there is less than before the one, and than behind the other.
        is_behind_forward = gap.before is not None and gap.before[0] is PassKind.FORWARD
        if is_behind_forward or (gap.after is not None and gap.after[0] is PassKind.BACKWARD):
            by_gap.setdefault(gap, set()).add(in_flight)
    return tuple(Moment(in_flight=in_flight, gap=gap) for gap, vectors in by_gap.items() for in_flight in list_largest(vectors))


def shorten(rank: RankModel) -> RankModel:
    """Return `rank` with as few microbatches as have all its moments, and at least two more than are ever in flight.

    What a plan does to such a step it does to the whole one, whose other microbatches repeat the same moments. It takes a part
    of the time to simulate.
    """
    chunks = len(rank.chunks)
    places = set(_list_places(rank.passes, chunks))
    most = max((count for _, in_flight in places for count in in_flight), default=0)
    for microbatches in range(most + 2, 2 * most + 2):
        passes = tuple(one for one in rank.passes if one.microbatch < microbatches)
        if set(_list_places(passes, chunks)) == places:
            return dataclasses.replace(rank, passes=passes)
    return rank


def shorten_together(ranks: Sequence[RankModel], shorts: Sequence[RankModel]) -> tuple[RankModel, ...]:
    """Return a pipeline with as many microbatches as the longest of `shorts`, which `shorten` made of each of its ranks."""
    microbatches = max((1 + one.microbatch for short in shorts for one in short.passes), default=0)
    return tuple(
        dataclasses.replace(rank, passes=tuple(one for one in rank.passes if one.microbatch < microbatches)) for rank in ranks
    )


def list_largest(vectors: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the vectors of which one has the largest product with any vector of numbers from 0, the largest first."""
    found = sorted(set(vectors), reverse=True)
    # Halfway between two others, or below that, none is larger than both: under the interleaved schedule there are whole lines
    # of them, as one chunk takes over from another. A vector below one other is halfway between that one and itself.
    return [
        one
        for one in found
        if not any(
            _exceeds(tuple(a + b for a, b in zip(left, right, strict=True)), tuple(2 * a for a in one))
            for left, right in itertools.combinations_with_replacement([other for other in found if other != one], 2)
        )
    ]


def count_backwards(passes: Iterable[Pass], *, chunk: int) -> int:
    """Return how many microbatches a step takes through `chunk`."""
    return sum(one.kind is PassKind.BACKWARD and one.chunk == chunk for one in passes)


def _list_places(passes: Sequence[Pass], chunks: int) -> Iterator[tuple[Gap, tuple[int, ...]]]:
    """Yield, behind each pass, what it is between, and how many microbatches are in flight there, by chunk."""
    current = [0] * chunks
    for gap, one in zip(_list_gaps(passes)[1:], passes, strict=True):
        current[one.chunk] += 1 if one.kind is PassKind.FORWARD else -1
        yield gap, tuple(current)


def _list_gaps(passes: Sequence[Pass]) -> list[Gap]:
    ways: list[Way | None] = [None, *((one.kind, one.chunk) for one in passes), None]
    return [Gap(before=before, after=after) for before, after in itertools.pairwise(ways)]


def _exceeds(large: tuple[int, ...], small: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(large, small, strict=True))
