"""The solver's mixed-integer program: how many layers of each kind do what, at the least added time.

One program is one rank. Its whole numbers are, for each chunk, what the last layer does, and for each kind of the other layers
how many do what: those are alike here, and `placement` tells them apart. What a layer costs is measured (`frontier`).

    least     for each chunk: microbatches * (seconds that its layers add + seconds for the first copy back)
    so that   at each moment: static + in flight * what layers keep + the most beside that <= device budget
              and             in flight * what layers move <= host budget

The first copy back of a pass hides behind nothing, since backward has to come to a group of a chunk before any other of that
chunk is called back. Where the last layer moves anything that is in its measured time; where it moves nothing, the next one
waits.

The simulator has the last word, and tells how far the program was off. Solved by HiGHS, through `scipy.optimize.milp`.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer, RankModel
from fgoffload.planner.ranks.schedule import PassKind
from fgoffload.planner.solving.choices import Configuration
from fgoffload.planner.solving.chunk_totals import count_copy_room_s, count_extra_bytes, count_fixed_bytes, count_step_s
from fgoffload.planner.solving.frontier import LayerPoint, LayerPoints, Place
from fgoffload.planner.solving.moments import Moment, count_backwards, list_largest, list_moments

if TYPE_CHECKING:
    import scipy.optimize

DEFAULT_GAP = 1e-3
"""Of the step: how far from its best HiGHS may stop. Predictions are further off, and it saves most of its time."""

_EXTRA_STEPS = 8
_WAIT_STEPS = 16
"""Whether any layer has so much beside what is kept, or makes compute wait so long, is a decision of the program. It has one
for each step of so many times the resolution: in long chunks a third of a layer's bytes, and two thirds of its forward. Finer
steps make it slower."""

_TIE_S_PER_BYTE = 1e-15
"""Seconds that a byte which is moved counts for: of plans that are equally fast the one that moves less, a microsecond a GB."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCounts:
    """What the layers of a chunk do."""

    last: Configuration | None
    """The last layer. None in a chunk without layers."""
    inner: Mapping[str, tuple[tuple[Configuration, int], ...]]
    """The other ones: by kind, how many do what."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """What a program came to. Its figures are no predictions: those are the simulator's."""

    chunks: tuple[ChunkCounts, ...]
    """By number of the chunk."""
    added_s: float
    """Seconds that the program expects the plan to add to a step."""
    bound_s: float
    """No choice adds less, as the program counts: with `added_s` the gap that HiGHS left."""
    peak_bytes: int
    """The most at any moment, as the program counts."""


def load_solver() -> None:
    """Import what solves programs: half a second, which a plan that keeps all can do without."""
    import scipy.optimize
    import scipy.sparse  # noqa: F401


def solve_program(
    rank: RankModel,
    points: Mapping[str, LayerPoints],
    *,
    budget_bytes: int | None,
    moved_s_per_byte: float = 0.0,
    gap: float = DEFAULT_GAP,
    time_limit_s: float = math.inf,
) -> ProgramResult | None:
    """Return the choices that add the least time within the budget, or None where there are none, or none was found.

    Args:
        rank: The rank. Its `host_budget_bytes` holds for the bytes of all microbatches in flight.
        points: What each kind of its layers may do.
        budget_bytes: Of the device. None asks for the least peak instead of the least time.
        moved_s_per_byte: Seconds that a byte which leaves, of one microbatch, costs beside what was measured of its layer.
        gap: How far from the best the result may be, as a part of the time of a step.
        time_limit_s: For HiGHS. With the best that was found until then; a result may then differ from run to run.
    """
    program = _Program(rank, points, moved_s_per_byte)
    program.add_memory(budget_bytes)
    return program.solve(gap, time_limit_s)


class _Row(dict[int, float]):
    """A sum of variables times numbers, by number of the variable; and `constant`, what is added."""

    constant: float = 0.0

    def add(self, other: "_Row", times: float = 1.0) -> None:
        for variable, factor in other.items():
            self[variable] = self.get(variable, 0.0) + factor * times
        self.constant += other.constant * times


@dataclasses.dataclass(slots=True, kw_only=True)
class _Chunk:
    """The variables of one chunk, and what they add up to."""

    kept: _Row
    """Bytes that a microbatch keeps."""
    moved: _Row
    """Bytes that a microbatch moves."""
    extra: int
    """The variable of the most bytes beside what is kept. It costs nothing: a solution may have it larger than that."""
    extras: list[tuple[float, int | None, _Row]]
    """What that is the most of: bytes, the variable of the layers that have them, None for what is always there, and a sum that
    is less."""
    last: list[tuple[LayerPoint, int]]
    """What the last layer may do, each with the variable that says whether it does."""
    inner: dict[str, list[tuple[LayerPoint, int]]]
    """What the others may do, by kind, each with the variable that says how many do."""


class _Program:
    """The variables, rows and costs of one rank, while they are put together."""

    def __init__(self, rank: RankModel, points: Mapping[str, LayerPoints], moved_s_per_byte: float) -> None:
        self._rank = rank
        # HiGHS wants numbers near 1, and takes 1e-9 for 0: bytes and seconds are counted in layers.
        layers = [layer.model for chunk in rank.chunks for layer in chunk.layers]
        self._unit_bytes = float(max([1, *(layer.saved_bytes for layer in layers)]))
        self._unit_s = max([1e-6, *(layer.forward_s for layer in layers)])
        self._points = points
        self._moved_s_per_byte = moved_s_per_byte
        self._resolution_s = max((one.resolution_s for one in points.values()), default=1.0)
        self._resolution_bytes = max((one.resolution_bytes for one in points.values()), default=1)
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._costs: list[float] = []
        self._is_whole: list[int] = []
        self._rows: list[tuple[_Row, float, float]] = []
        self._ties = _Row()
        self._moments = _merge_moments(list_moments(rank.passes, chunks=len(rank.chunks)))
        # The step as it is without any plan: HiGHS takes a gap as a part of the whole objective.
        self._step = self._add(1, 1, cost=count_step_s(rank) / self._unit_s)
        self._chunks = [self._add_chunk(number, chunk) for number, chunk in enumerate(rank.chunks)]
        self._peak = -1

    # Choices.

    def _add_chunk(self, number: int, chunk: ChunkModel) -> _Chunk:
        found = _Chunk(kept=_Row(), moved=_Row(), extra=self._add(0, math.inf), extras=[], last=[], inner={})
        found.kept.constant = count_fixed_bytes(chunk) / self._unit_bytes
        least_extra = count_extra_bytes(chunk) / self._unit_bytes
        found.extras.append((least_extra, None, _Row()))
        self._require(_Row({found.extra: 1.0}), least_extra, math.inf)
        if not chunk.layers:
            return found
        microbatches = count_backwards(self._rank.passes, chunk=number)
        last = chunk.layers[-1].model
        found.last = [
            (point, self._add_point(found, point, point.last, 1, microbatches)) for point in self._points[last.kind].last
        ]
        self._require(_Row(dict.fromkeys([variable for _, variable in found.last], 1.0)), 1, 1)
        for kind, layers in _count_kinds(chunk.layers[:-1]).items():
            found.inner[kind] = [
                (point, self._add_point(found, point, point.inner, layers, microbatches)) for point in self._points[kind].inner
            ]
            self._require(_Row(dict.fromkeys([variable for _, variable in found.inner[kind]], 1.0)), layers, layers)
        self._add_first_copy(found, len(chunk.layers) - 1, microbatches)
        self._add_late_copies(found, chunk, microbatches)
        self._add_extra(found, len(chunk.layers) - 1)
        return found

    def _add_point(self, chunk: _Chunk, point: LayerPoint, place: Place, layers: int, microbatches: int) -> int:
        moved_bytes = point.configuration.moved_bytes
        tie = microbatches * moved_bytes * _TIE_S_PER_BYTE / self._unit_s
        added_s = place.added_s + moved_bytes * self._moved_s_per_byte
        variable = self._add(0, layers, cost=microbatches * added_s / self._unit_s + tie, is_whole=True)
        self._ties[variable] = tie
        chunk.kept[variable] = point.configuration.kept_bytes / self._unit_bytes
        chunk.moved[variable] = moved_bytes / self._unit_bytes
        return variable

    def _add_first_copy(self, chunk: _Chunk, inner_layers: int, microbatches: int) -> None:
        """Add the seconds for which the first copy back is waited for where the last layer moves nothing."""
        waits = [(point.first_wait_s / self._unit_s, variable) for points in chunk.inner.values() for point, variable in points]
        longest = max((wait for wait, _ in waits), default=0.0)
        moving = _Row(dict.fromkeys([variable for point, variable in chunk.last if point.configuration.moved_bytes], longest))
        waited = self._add(0, math.inf, cost=microbatches)
        self._add_levels(waits, waited, moving, inner_layers, step=_WAIT_STEPS * self._resolution_s / self._unit_s)

    def _add_late_copies(self, chunk: _Chunk, model: ChunkModel, microbatches: int) -> None:
        """Add the seconds for which forward waits since all its layers together move more than the link takes meanwhile.

        Short simulations say what a layer waits for once the window is full. Layers that each move a bit more than the link
        takes beside them fill it only in a long chunk.
        """
        places = [(point, point.last, variable) for point, variable in chunk.last]
        places += [(point, point.inner, variable) for points in chunk.inner.values() for point, variable in points]
        late = self._add(0, math.inf, cost=microbatches)
        row = _Row({late: 1.0})
        for point, place, variable in places:
            waited_s = max(place.added_s - point.configuration.recompute_s, 0.0)
            row[variable] = (waited_s - place.d2h_s) / self._unit_s
        self._require(row, -count_copy_room_s(self._rank, model) / self._unit_s, math.inf)

    def _add_extra(self, chunk: _Chunk, inner_layers: int) -> None:
        """Let the most bytes beside what is kept be those of the layer that has most."""
        for point, variable in chunk.last:
            extra = point.last.extra_bytes / self._unit_bytes
            chunk.extras.append((extra, variable, _Row()))
            self._require(_Row({chunk.extra: 1.0, variable: -extra}), 0, math.inf)
        sizes = [
            (point.inner.extra_bytes / self._unit_bytes, variable)
            for points in chunk.inner.values()
            for point, variable in points
        ]
        # When backward is in the layers before, what the last one kept is gone.
        freed = _Row({variable: point.kept_bytes / self._unit_bytes for point, variable in chunk.last})
        step = _EXTRA_STEPS * self._resolution_bytes / self._unit_bytes
        chunk.extras += [(round(size / step) * step, variable, freed) for size, variable in sizes]
        self._add_levels(sizes, chunk.extra, freed, inner_layers, step=step)

    def _add_levels(self, amounts: Sequence[tuple[float, int]], most: int, less: _Row, layers: int, *, step: float) -> None:
        """Let the variable `most` be at least the largest amount of those that any layer has, less what `less` comes to.

        Args:
            amounts: Each with the variable that counts the layers which have it.
            most: The variable.
            less: A sum.
            layers: How many there are.
            step: Amounts are rounded to multiples of it: whether any layer has so much is a decision for each.
        """
        rounded = [(round(amount / step), variable) for amount, variable in amounts]
        for level in sorted({steps for steps, _ in rounded if steps > 0}):
            variables = [variable for steps, variable in rounded if steps >= level]
            has_any = self._add(0, 1, is_whole=True)
            self._require(_Row({has_any: float(layers), **dict.fromkeys(variables, -1.0)}), 0, math.inf)
            row = _Row({most: 1.0, has_any: -level * step})
            row.add(less)
            self._require(row, 0, math.inf)

    # Memory.

    def add_memory(self, budget_bytes: int | None) -> None:
        """Hold each moment to the budget, or, where it is None, make the largest of them as small as it can be."""
        upper = math.inf if budget_bytes is None else budget_bytes / self._unit_bytes
        # The least peak counts before any time: a gigabyte is worth a thousand seconds. With a budget it is worth nothing.
        self._peak = self._add(0, upper, cost=1e6 if budget_bytes is None else 0.0)
        for in_flight, backward in self._moments:
            row = self._make_memory_row(in_flight, backward)
            row[self._peak] = -1.0
            self._require(row, -math.inf, 0)
        if self._rank.host_budget_bytes is not None:
            for in_flight in list_largest({in_flight for in_flight, _ in self._moments}):
                row = _Row()
                for microbatches, chunk in zip(in_flight, self._chunks, strict=True):
                    row.add(chunk.moved, microbatches)
                self._require(row, -math.inf, self._rank.host_budget_bytes / self._unit_bytes)

    def _make_memory_row(self, in_flight: Sequence[int], backward: int | None) -> _Row:
        row = _Row()
        row.constant = self._rank.static_bytes / self._unit_bytes
        for microbatches, chunk in zip(in_flight, self._chunks, strict=True):
            row.add(chunk.kept, microbatches)
        if backward is not None:
            row[self._chunks[backward].extra] = 1.0
        return row

    # The program as a whole.

    def solve(self, gap: float, time_limit_s: float) -> ProgramResult | None:
        """Hand it to HiGHS."""
        import numpy as np
        import scipy.optimize

        options = {"mip_rel_gap": gap} | ({} if math.isinf(time_limit_s) else {"time_limit": max(time_limit_s, 0.01)})
        solved = scipy.optimize.milp(
            np.array(self._costs),
            integrality=np.array(self._is_whole),
            bounds=scipy.optimize.Bounds(np.array(self._lower), np.array(self._upper)),
            constraints=self._make_constraints(),
            options=options,
        )
        if solved.x is None:
            return None
        bound = solved.fun if solved.mip_dual_bound is None else solved.mip_dual_bound
        fixed = solved.x[self._peak] * self._costs[self._peak] + self._costs[self._step]
        fixed += sum(solved.x[variable] * tie for variable, tie in self._ties.items())
        return ProgramResult(
            chunks=tuple(_read_chunk(chunk, solved.x) for chunk in self._chunks),
            added_s=float(solved.fun - fixed) * self._unit_s,
            bound_s=float(bound - fixed) * self._unit_s,
            peak_bytes=self._read_peak(solved.x),
        )

    def _make_constraints(self) -> "scipy.optimize.LinearConstraint":
        import scipy.optimize
        import scipy.sparse

        places = [(row, variable, factor) for row, (sums, _, _) in enumerate(self._rows) for variable, factor in sums.items()]
        rows, columns, factors = zip(*places, strict=True)
        matrix = scipy.sparse.csr_array((factors, (rows, columns)), shape=(len(self._rows), len(self._costs)))
        lower = [low - sums.constant for sums, low, _ in self._rows]
        upper = [high - sums.constant for sums, _, high in self._rows]
        return scipy.optimize.LinearConstraint(matrix, lower, upper)

    def _read_peak(self, solution: Sequence[float]) -> int:
        kept = [
            chunk.kept.constant + sum(solution[variable] * factor for variable, factor in chunk.kept.items())
            for chunk in self._chunks
        ]
        extras = [_read_extra(chunk, solution) for chunk in self._chunks]
        most = 0.0
        for in_flight, backward in self._moments:
            size = self._rank.static_bytes / self._unit_bytes
            size += sum(microbatches * one for microbatches, one in zip(in_flight, kept, strict=True))
            most = max(most, size if backward is None else size + extras[backward])
        return round(most * self._unit_bytes)

    def _add(self, lower: float, upper: float, *, cost: float = 0.0, is_whole: bool = False) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self._costs.append(cost)
        self._is_whole.append(int(is_whole))
        return len(self._costs) - 1

    def _require(self, row: _Row, lower: float, upper: float) -> None:
        self._rows.append((row, lower, upper))


def _read_extra(chunk: _Chunk, solution: Sequence[float]) -> float:
    """Return the most beside what is kept in a chunk, by what its layers do."""
    return max(
        size - sum(solution[one] * factor for one, factor in less.items())
        for size, variable, less in chunk.extras
        if variable is None or round(solution[variable])
    )


def _read_chunk(chunk: _Chunk, solution: Sequence[float]) -> ChunkCounts:
    last = next((point.configuration for point, variable in chunk.last if round(solution[variable])), None)
    inner = {
        kind: tuple((point.configuration, round(solution[variable])) for point, variable in points if round(solution[variable]))
        for kind, points in chunk.inner.items()
    }
    return ChunkCounts(last=last, inner=inner)


def _merge_moments(moments: Iterable[Moment]) -> list[tuple[tuple[int, ...], int | None]]:
    """Return what a program needs of moments: microbatches in flight by chunk, and the chunk whose backward begins, or None.

    What ended makes no difference to it, so that of moments before the same backward the largest are left.
    """
    before: dict[int | None, set[tuple[int, ...]]] = {}
    for moment in moments:
        after = moment.gap.after
        before.setdefault(after[1] if after is not None and after[0] is PassKind.BACKWARD else None, set()).add(
            moment.in_flight
        )
    return [(in_flight, chunk) for chunk, vectors in before.items() for in_flight in list_largest(vectors)]


def _count_kinds(layers: Iterable[NumberedLayer]) -> dict[str, int]:
    return dict(collections.Counter(layer.model.kind for layer in layers))
