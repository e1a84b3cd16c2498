"""Microbatches in flight of a rank between two passes, and the shortest step in which all of these occur.

A step of hundreds of passes has about a dozen such times, whatever the plan.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import Pass, PassKind


@functools.lru_cache(maxsize=64)
def list_in_flight(passes: tuple[Pass, ...], chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches in flight between two passes, by chunk."""
    return tuple({in_flight for _, in_flight, _ in _list_gaps(passes, chunks)})


def shorten(rank: RankModel) -> RankModel:
    """Return `rank` with the fewest microbatches that have all its peak times, at least two more than are ever in flight.

    A plan has the same effect on such a step as on the whole one, whose other microbatches repeat the same.
    """
    chunks = len(rank.chunks)
    places = _list_places(rank.passes, chunks)
    most = max((count for _, in_flight, _ in places for count in in_flight), default=0)
    for microbatches in range(most + 2, 2 * most + 2):
        passes = tuple(one for one in rank.passes if one.microbatch < microbatches)
        if _list_places(passes, chunks) == places:
            return dataclasses.replace(rank, passes=passes)
    return rank


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
