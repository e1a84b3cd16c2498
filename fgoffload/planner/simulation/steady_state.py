"""Rounds of a schedule that repeat: found in a list of passes, taken out of it, and counted in again.

Between its first forwards and its last backwards a rank does the same over and over: a forward and a backward of the next
microbatch, or of the next group of them through all chunks. When two of these rounds in a row took the same time on all ranks,
left the same behind on the link and in memory and counted the same, those after them do too, and need not be simulated.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.simulation_result import RankResult, TagTraffic, Waits

ROUNDS = 6
"""Rounds that are simulated: two until everything is under way, two to compare, and two before the last backwards."""

_LEAST_SAVING = 0.3
"""The part of the passes that must go. Below that it is not worth the risk of simulating twice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The passes of a rank without most of its rounds."""

    passes: tuple[Pass, ...]
    """What is left to simulate."""
    places: tuple[int, int, int]
    """How many passes are over when the rounds begin that are compared, between them, and when they are over."""


def take_out_rounds(passes_by_rank: Sequence[Sequence[Pass]], chunks: int) -> tuple[Sequence[Rounds], int] | None:
    """Return the passes of each rank without rounds that repeat, and how many these are, the same of all ranks.

    Args:
        passes_by_rank: What each rank runs.
        chunks: Of each rank.

    Returns:
        None where too few rounds repeat.
    """
    microbatches = _count_group(passes_by_rank[0]) if chunks > 1 else 1
    length = 2 * microbatches * chunks
    found = [_find_rounds(passes, length, microbatches) for passes in passes_by_rank]
    left_out = min(count for _, count in found) - ROUNDS
    if left_out * length < _LEAST_SAVING * max(len(passes) for passes in passes_by_rank):
        return None
    rounds = []
    for passes, (start, _) in zip(passes_by_rank, found, strict=True):
        behind = passes[start + left_out * length :]
        renumbered = (dataclasses.replace(one, microbatch=one.microbatch - left_out * microbatches) for one in behind)
        first, second, third = (start + count * length for count in (2, 3, 4))
        rounds.append(Rounds(passes=(*passes[:start], *renumbered), places=(first, second, third)))
    return rounds, left_out


def _count_group(passes: Sequence[Pass]) -> int:
    """Return how many microbatches go through the first chunk before another chunk has its turn."""
    for count, one in enumerate(passes):
        if one.chunk != passes[0].chunk or one.kind is not passes[0].kind:
            return count
    return len(passes)


def _find_rounds(passes: Sequence[Pass], length: int, microbatches: int) -> tuple[int, int]:
    """Return the pass with which rounds begin that repeat, and how many there are.

    Args:
        passes: Of a rank.
        length: Passes of a round.
        microbatches: By which a round's microbatches are later than those of the round before.
    """
    first_backward = next((place for place, one in enumerate(passes) if one.kind is PassKind.BACKWARD), len(passes))
    start = max(0, first_backward - 1)
    end = start
    while end + length < len(passes):
        one, later = passes[end], passes[end + length]
        if (later.kind, later.chunk, later.microbatch) != (one.kind, one.chunk, one.microbatch + microbatches):
            break
        end += 1
    return start, (end - start) // length + 1 if end > start else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """A rank between two rounds."""

    totals: RankResult
    """What it has come to so far; `step_s` is how far it is."""
    left_behind: tuple[float, ...]
    """Bytes on the device, on the host, and on their way: what the next round finds."""


def add_rounds(
    results: Sequence[RankResult], states_by_rank: Sequence[Sequence[RoundState]], left_out: int
) -> tuple[RankResult, ...] | None:
    """Return the results of all ranks with the rounds that were left out.

    Args:
        results: Without them.
        states_by_rank: At the three places of `Rounds.places`.
        left_out: How many rounds.

    Returns:
        None where the two rounds between these places are not alike.
    """
    rounds = []
    for before, between, after in states_by_rank:
        one, other = _subtract(before.totals, between.totals), _subtract(between.totals, after.totals)
        if not (_is_close(one, other) and _is_close(before.left_behind, between.left_behind, after.left_behind)):
            return None
        rounds.append(other)
    # A rank that takes longer than the others makes them wait sooner or later.
    if not _is_close(*([numbers["step_s"]] for numbers in rounds)):
        return None
    return tuple(_add(result, numbers, left_out) for result, numbers in zip(results, rounds, strict=True))


_COUNTED = (
    "step_s",
    "d2h_bytes",
    "h2d_bytes",
    "recalled_bytes",
    "kept_bytes",
    "compute_s",
    "slowed_s",
    "recompute_s",
    "d2h_s",
    "h2d_s",
)
"""What grows with each round."""

_TAG_NUMBERS = tuple(field.name for field in dataclasses.fields(TagTraffic) if field.name not in ("kind", "tag", "action"))
"""The same, of a tag."""


def _subtract(before: RankResult, after: RankResult) -> dict[str, float]:
    """Return what grew, by name."""
    former = _name_numbers(before)
    return {name: number - former.get(name, 0) for name, number in _name_numbers(after).items()}


def _name_numbers(result: RankResult) -> dict[str, float]:
    numbers = {name: getattr(result, name) for name in _COUNTED}
    numbers |= {f"waits.{name}": number for name, number in dataclasses.asdict(result.waits).items()}
    for tag in result.tags:
        numbers |= {f"{_label(tag)}.{name}": getattr(tag, name) for name in _TAG_NUMBERS}
    return numbers


def _label(tag: TagTraffic) -> str:
    return f"{tag.kind}.{tag.tag}.{tag.action.value}"


def _add(result: RankResult, numbers: Mapping[str, float], times: int) -> RankResult:
    """Return `result` with `numbers` added `times` times."""

    def more(name: str, number: Any) -> Any:
        return number + times * numbers.get(name, 0)

    waits = {name: more(f"waits.{name}", number) for name, number in dataclasses.asdict(result.waits).items()}
    tags = []
    for tag in result.tags:
        label = _label(tag)
        grown = {name: more(f"{label}.{name}", getattr(tag, name)) for name in _TAG_NUMBERS}
        tags.append(dataclasses.replace(tag, **grown))
    counted = {name: more(name, getattr(result, name)) for name in _COUNTED}
    return dataclasses.replace(result, waits=Waits(**waits), tags=tuple(tags), **counted)


def _is_close(*rows: Mapping[str, float] | Sequence[float]) -> bool:
    """Return whether all rows have the same numbers, but for rounding."""
    first, *others = (tuple(row.values()) if isinstance(row, Mapping) else tuple(row) for row in rows)
    return all(
        len(other) == len(first)
        and all(math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-9) for one, two in zip(first, other, strict=True))
        for other in others
    )
