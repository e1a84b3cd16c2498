"""Rounds of a schedule that repeat: found in a list of passes, left out of it, and counted in again.

Between its first forwards and its last backwards a rank does the same over and over: a forward and a backward of the next
microbatch, or of the next group of them through all chunks. When some of these rounds in a row took a rank the same time, left
the same behind on its link and in memory and counted the same, those after them do too, and need not be simulated.

    [Note: How many have to be alike]
    What a round does depends on the microbatches that are in flight when it begins: on what the host budget took of them, and
    on when they came through the ranks behind. So a change comes around again after as many rounds as there are microbatches
    in flight, and two rounds that are alike say nothing of it. Alike have to be those of all that time, there and back. But
    where all that a rank has in flight is known by name, and all ranks have the same at both ends of a round, with the same
    input made and not used, all that follows is that round again. Where something stayed since the host budget was used up,
    it is by name alone that rounds are alike: as many bytes may be of other microbatches.

    [Note: Ranks that are not equally fast]
    All that a rank knows of its neighbours is how long it waits for them. As long as it does not have to wait for a slower one,
    and waits for one that is as fast as long as before, its rounds stay alike. What lies ready for it from a slower one lies
    there a bit shorter in each round: from the shortest of these times follows how many rounds that goes on.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fgoffload.planner.ranks.schedule import Pass, PassKind
from fgoffload.planner.simulation.pass_order import PassOrder
from fgoffload.planner.simulation.rank_run import RoundState
from fgoffload.planner.simulation.simulation_result import RankResult, TagTraffic, Waits

_UNTIL_UNDER_WAY = 2
"""Rounds before the first that are compared."""

_FEWEST_NAMED = 5
"""Rounds: of fewer all are simulated."""

_ROUNDING = 1e-13
"""What is rounded of a moment of a step, as a part of it: some hundred additions."""

_CHECK_PARTS = 4
"""Where they are not alike, rounds are compared again when a fourth more were simulated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Where the rounds of a step are."""

    starts: tuple[int, ...]
    """By rank, how many passes are before the first."""
    passes: int
    """Of a round, on each rank."""
    microbatches: int
    """That go through all chunks in a round."""
    count: int
    """How many there are, on the rank that has fewest."""
    are_named: bool = False
    """Whether ranks say what they have in flight."""

    @property
    def compared(self) -> int:
        """Rounds that have to be alike where nobody says that. See [Note: How many have to be alike]."""
        return 2 + math.ceil(2 * max(self.starts) / self.passes)

    @property
    def back(self) -> int:
        """How many rounds back what is compared begins."""
        return 1 if self.are_named else self.compared

    def list_checks(self) -> Iterator[int]:
        """Yield after how many rounds to compare the last ones."""
        number = 1 if self.are_named else _UNTIL_UNDER_WAY + self.compared
        while number < self.count:
            yield number
            number += 1 if self.are_named else max(1, number // _CHECK_PARTS)

    def list_marks(self) -> list[list[int]]:
        """Return, by rank, after how many passes to look at it: before, between and behind the rounds that are compared."""
        return [
            [start + (number - back) * self.passes for number in self.list_checks() for back in range(self.back + 1)]
            for start in self.starts
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rounds that are alike, and were not simulated."""

    numbers: Sequence[Mapping[str, float]]
    """By rank, what one of them counts, by name."""
    times: int
    """How many."""


def find_rounds(passes_by_rank: Sequence[Sequence[Pass]], chunks: int, *, are_named: bool = False) -> Rounds | None:
    """Return where rounds are that repeat, or None where there are too few to leave any out.

    Args:
        passes_by_rank: What each rank runs.
        chunks: Of each rank.
        are_named: Whether all ranks say what they have in flight.
    """
    microbatches = _count_group(passes_by_rank[0]) if chunks > 1 else 1
    length = 2 * microbatches * chunks
    found = [_find_start(passes, length, microbatches) for passes in passes_by_rank]
    count = min(count for _, count in found)
    rounds = Rounds(
        starts=tuple(start for start, _ in found),
        passes=length,
        microbatches=microbatches,
        count=count,
        are_named=are_named and count >= _FEWEST_NAMED,
    )
    return rounds if any(rounds.list_checks()) else None


def leave_out_rounds(order: PassOrder, rounds: Rounds) -> list[LeftOut]:
    """Run rounds until they are alike, and leave out those behind them, as often as there are any.

    Args:
        order: The ranks at the start of the step, with the marks of `rounds`. The passes that it has left are still to be run.
        rounds: Those of its passes.
    """
    left_out: list[LeftOut] = []
    count, first = rounds.count, 0
    for number in rounds.list_checks():
        if not first <= number - rounds.back < count - rounds.back:
            continue
        places = [start + number * rounds.passes for start in rounds.starts]
        _run_to(order, places, rounds.passes)
        ends = _find_ends(order, places, rounds.passes)
        lengths_s = [after.step_s - before.step_s for before, after in ends]
        begun = max(-((start - over) // rounds.passes) for start, over in zip(rounds.starts, order.over, strict=True))
        # What is cheap to find out comes first.
        times = int(min(count - begun, _count_alike(order, lengths_s))) if ends else 0
        if times <= 0:
            continue
        is_alike = rounds.are_named and _is_named_alike(order, places, rounds.passes, ends)
        if not is_alike and (not rounds.are_named or number - rounds.compared >= first + _UNTIL_UNDER_WAY):
            is_alike = _are_alike(order, places, rounds)
        if is_alike:
            numbers = [_subtract(_name_numbers(before), _name_numbers(after)) for before, after in ends]
            left_out.append(LeftOut(numbers=numbers, times=times))
            later_s = [0.0 if _is_as_fast(one_s, lengths_s[0]) else one_s - lengths_s[0] for one_s in lengths_s]
            order.leave_out(times * rounds.passes, times * rounds.microbatches, [times * one_s for one_s in later_s])
            count, first = count - times, begun
    return left_out


def add_rounds(result: RankResult, numbers: Mapping[str, float], times: int) -> RankResult:
    """Return the result of a rank with what `times` rounds count, each of them `numbers`."""

    def more(name: str, number: Any) -> Any:
        return number + times * numbers.get(name, 0)

    waits = {name: more(f"waits.{name}", getattr(result.waits, name)) for name in _WAITS}
    tags = []
    for tag in result.tags:
        label = _label(tag)
        grown = {name: more(f"{label}.{name}", getattr(tag, name)) for name in _TAG_NUMBERS}
        tags.append(dataclasses.replace(tag, **grown))
    counted = {name: more(name, getattr(result, name)) for name in _COUNTED}
    return dataclasses.replace(result, waits=Waits(**waits), tags=tuple(tags), **counted)


def _run_to(order: PassOrder, places: Sequence[int], length: int) -> None:
    """Let each rank come to its place, and a few passes behind it where others wait for those."""
    most = max(places)
    for ahead in range(0, most + length, length):
        order.run_until([place + ahead for place in places])
        if all(over >= place for over, place in zip(order.over, places, strict=True)):
            return


def _find_ends(order: PassOrder, places: Sequence[int], length: int) -> list[tuple[RoundState, RoundState]]:
    """Return, by rank, what was seen before and behind the round before its place; nothing where a rank is not there."""
    pairs = [(states.get(place - length), states.get(place)) for states, place in zip(order.states, places, strict=True)]
    found = [(before, after) for before, after in pairs if before is not None and after is not None]
    return found if len(found) == len(pairs) else []


def _are_alike(order: PassOrder, places: Sequence[int], rounds: Rounds) -> bool:
    """Return whether the rounds before their places are alike on all ranks."""
    for states, place in zip(order.states, places, strict=True):
        marks = [place - back * rounds.passes for back in reversed(range(rounds.compared + 1))]
        if not all(mark in states for mark in marks):
            return False
        seen = [states[mark] for mark in marks]
        # Bytes and counts do not say which microbatches a full host budget let leave: as many may be others the next time.
        if seen[-1].tallies.has_kept():
            return False
        lengths_s = [[after.step_s - before.step_s] for before, after in itertools.pairwise(seen)]
        # What is cheap to compare comes first.
        if not (_is_close(*(state.left_behind for state in seen)) and _is_close(*lengths_s)):
            return False
        counted = [_subtract(before, after) for before, after in itertools.pairwise(map(_name_numbers, seen))]
        if not _is_close(*counted):
            return False
    return True


def _is_named_alike(
    order: PassOrder, places: Sequence[int], length: int, ends: Sequence[tuple[RoundState, RoundState]]
) -> bool:
    """Return whether all that is in flight at the end of the last round was at its start, by name, on all ranks."""
    if any(after.in_flight is None or before.in_flight != after.in_flight for before, after in ends):
        return False
    if not all(_is_close(before.left_behind, after.left_behind) for before, after in ends):
        return False
    # A neighbour is at its place of the same round: it is ahead by what either begins with, and by less than two rounds.
    most = 2 * length + max(places) - min(places)
    former = [place - length for place in places]
    made_before_s = order.list_made_s(former, [before.step_s for before, _ in ends], most)
    made_s = order.list_made_s(places, [after.step_s for _, after in ends], most)
    # Waits that come ever closer to their last value are not there yet, and all rounds to come would have what is missing.
    rounding_s = _ROUNDING * max(after.step_s for _, after in ends)
    return len(made_before_s) == len(made_s) and all(
        abs(before_s - after_s) <= rounding_s for before_s, after_s in zip(made_before_s, made_s, strict=True)
    )


def _count_alike(order: PassOrder, lengths_s: Sequence[float]) -> float:
    """Return for how many rounds all ranks go on like that. See [Note: Ranks that are not equally fast].

    Args:
        order: The ranks.
        lengths_s: How long the last round took on each.
    """
    fewest = math.inf
    for rank, own_s in enumerate(lengths_s):
        for neighbour, margin_s in order.list_margins(rank):
            less_s = 0.0 if _is_as_fast(own_s, lengths_s[neighbour]) else lengths_s[neighbour] - own_s
            if less_s and margin_s < 0:
                return 0
            if less_s > 0 and margin_s < math.inf:
                # One round less, for rounding.
                fewest = min(fewest, margin_s // less_s - 1)
    return fewest


def _is_as_fast(one_s: float, other_s: float) -> bool:
    return _is_close([one_s], [other_s])


def _count_group(passes: Sequence[Pass]) -> int:
    """Return how many microbatches go through the first chunk before another chunk has its turn."""
    for count, one in enumerate(passes):
        if one.chunk != passes[0].chunk or one.kind is not passes[0].kind:
            return count
    return len(passes)


def _find_start(passes: Sequence[Pass], length: int, microbatches: int) -> tuple[int, int]:
    """Return the pass with which rounds begin that repeat, and how many there are.

    Args:
        passes: Of a rank.
        length: Passes of a round.
        microbatches: By which a round's microbatches are later than those of the round before.
    """
    first_backward = next((place for place, one in enumerate(passes) if one.kind is PassKind.BACKWARD), len(passes))
    start = max(0, first_backward - 1)
    alike = 0
    for one, later in zip(passes[start:], passes[start + length :], strict=False):
        if later.microbatch != one.microbatch + microbatches or later.kind is not one.kind or later.chunk != one.chunk:
            break
        alike += 1
    return start, alike // length + 1 if alike else 0


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

_WAITS = tuple(field.name for field in dataclasses.fields(Waits))

_TAG_NUMBERS = tuple(field.name for field in dataclasses.fields(TagTraffic) if field.name not in ("kind", "tag", "action"))
"""The same, of a tag."""


def _subtract(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what grew, by name."""
    return {name: number - before.get(name, 0) for name, number in after.items()}


def _name_numbers(state: RoundState) -> dict[str, float]:
    counted = state.tallies.sum_up()
    counted |= {"step_s": state.step_s, "slowed_s": state.slowed_s + counted["slowed_s"]}
    numbers = {name: counted[name] for name in _COUNTED}
    numbers |= {f"waits.{name}": getattr(counted["waits"], name) for name in _WAITS}
    for tag in counted["tags"]:
        label = _label(tag)
        numbers |= {f"{label}.{name}": getattr(tag, name) for name in _TAG_NUMBERS}
    return numbers


def _label(tag: TagTraffic) -> str:
    return f"{tag.kind}.{tag.tag}.{tag.action.value}"


def _is_close(*rows: Mapping[str, float] | Sequence[float]) -> bool:
    """Return whether all rows have the same numbers, but for rounding."""
    first, *others = (tuple(row.values()) if isinstance(row, Mapping) else tuple(row) for row in rows)
    return all(
        len(other) == len(first)
        and all(math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-9) for one, two in zip(first, other, strict=True))
        for other in others
    )
