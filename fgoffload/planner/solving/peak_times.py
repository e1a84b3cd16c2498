"""Possible times of a rank's memory peak: microbatches in flight of each chunk, and the pass that begins.

A step of hundreds of passes has about a dozen such times, whatever the plan.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import Pass, PassKind


class PeakTime(NamedTuple):
    """A time between two passes at which memory may peak."""

    in_flight: tuple[int, ...]
    """Microbatches between forward and backward, by chunk."""
    backward: int | None
    """Chunk whose backward begins; None if a forward begins, or nothing."""


@functools.lru_cache(maxsize=64)
def list_in_flight(passes: tuple[Pass, ...], chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches in flight between two passes, by chunk."""
    return tuple({in_flight for _, in_flight, _ in _list_gaps(passes, chunks)})


@functools.lru_cache(maxsize=64)
def list_peak_times(passes: tuple[Pass, ...], chunks: int) -> tuple[PeakTime, ...]:
    """Return the times at which memory may peak: after each forward and before each backward.

    Times before the same backward are left out if they never take more than another one, whatever each chunk keeps.

    Args:
        passes: Passes of a step, in order.
        chunks: Number of chunks of the rank.
    """
    found: dict[int | None, set[tuple[int, ...]]] = {}
    for before, in_flight, after in _list_gaps(passes, chunks):
        is_backward = after is not None and after.kind is PassKind.BACKWARD
        # Between a backward and a forward there is less than before the backward, and than after the forward.
        if before.kind is PassKind.FORWARD or is_backward:
            found.setdefault(after.chunk if after is not None and is_backward else None, set()).add(in_flight)
    return tuple(PeakTime(in_flight, backward) for backward, vectors in found.items() for in_flight in list_largest(vectors))


def shorten(rank: RankModel) -> RankModel:
    """Return `rank` with the fewest microbatches that have all its peak times, at least two more than are ever in flight.

    A plan has the same effect on such a step as on the whole one, whose other microbatches repeat the same.
    """
    chunks = len(rank.chunks)
    places: set[Any] = _list_places(rank.passes, chunks)
    most = max((count for _, in_flight, _ in places for count in in_flight), default=0)
    for microbatches in range(most + 2, 2 * most + 2):
        passes = tuple(one for one in rank.passes if one.microbatch < microbatches)
        if _list_places(passes, chunks) == places:
            return dataclasses.replace(rank, passes=passes)
    return rank


def list_largest(vectors: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the vectors that can have the largest product with a non-negative vector, largest first."""
    import numpy as np

    found = sorted(set(vectors), reverse=True)
    table = np.array(found)
    is_larger = (table[:, None] >= table).all(axis=2).sum(axis=0) > 1  # than this one, itself included
    found = [one for one, is_beaten in zip(found, is_larger, strict=True) if not is_beaten]
    # A vector halfway between two others, or below, is never the largest: the interleaved schedule has many of them.
    table = np.array(found)
    sums = table[:, None] + table
    count = len(found)
    largest = []
    for place in range(count):
        is_above = (sums >= 2 * table[place]).all(axis=2)
        is_above[place, :] = is_above[:, place] = False
        if not is_above.any():
            largest.append(found[place])
    return largest


def count_backwards(passes: Iterable[Pass], *, chunk: int) -> int:
    """Return how many microbatches a step takes through `chunk`."""
    return sum(one.kind is PassKind.BACKWARD and one.chunk == chunk for one in passes)


def _list_places(passes: Sequence[Pass], chunks: int) -> set[Any]:
    return {
        ((before.kind, before.chunk), in_flight, after and (after.kind, after.chunk))
        for before, in_flight, after in _list_gaps(passes, chunks)
    }


def _list_gaps(passes: Sequence[Pass], chunks: int) -> Iterator[tuple[Pass, tuple[int, ...], Pass | None]]:
    """Yield each pass with how many microbatches are in flight behind it, by chunk, and the pass that follows."""
    current = [0] * chunks
    for one, following in zip(passes, (*passes[1:], None), strict=True):
        current[one.chunk] += 1 if one.kind is PassKind.FORWARD else -1
        yield one, tuple(current), following
