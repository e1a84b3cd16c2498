"""The solver's mixed-integer program: how many layers of each kind get which treatment, at the least added time.

One program is one rank. Its integers are, for each chunk, the treatment of the last layer, and for each kind of the others
the number of layers with each treatment. Costs of treatments come from short simulations (`layer_costs`).

    least     for each chunk: microbatches * (seconds that its layers add + seconds for the first reload)
    so that   at each peak time: static + in flight * kept bytes + most bytes beside those <= device budget
              and                in flight * offloaded bytes <= host budget

The first reload of a pass hides behind nothing. If the last layer offloads, its measured time has that wait; if not, the next
layer waits. The simulator checks the result, and says how far the program was off. Solved by HiGHS.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from fgoffload.planner.ranks.layer_model import Segment
from fgoffload.planner.ranks.rank_model import ChunkModel, RankModel
from fgoffload.planner.solving.layer_costs import Cost, LayerCosts, TreatmentCosts
from fgoffload.planner.solving.peak_times import count_backwards, list_largest, list_peak_times
from fgoffload.planner.solving.treatments import Treatment

_GAP = 2e-3
"""Gap at which HiGHS may stop, as a part of the step. Predictions are further off."""

_MOST_NODES = 40
"""Most nodes of the search tree of HiGHS. Most programs need fewer; others return the best solution so far."""

_EXTRA_STEPS, _WAIT_STEPS = 8, 16
"""Steps of the temporary bytes and of the waits of a layer, in resolutions of costs. Each step has a binary variable, so finer
ones make a program slower."""

_TIE_S_PER_BYTE = 1e-15
"""Tie-breaker between equally fast plans: an offloaded GB costs a microsecond."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCounts:
    """Treatments of a chunk's layers."""

    last: Treatment | None
    """Treatment of the last layer; None in a chunk without layers."""
    inner: Mapping[str, tuple[tuple[Treatment, int], ...]]
    """Number of the other layers with each treatment, by kind."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Solution of a program. Predictions are the simulator's."""

    chunks: tuple[ChunkCounts, ...]
    """Treatments by number of the chunk."""
    added_s: float
    """Seconds that the program expects the plan to add to a step."""


def solve_program(
    rank: RankModel, costs: Mapping[str, LayerCosts], *, budget_bytes: int | None, s_per_moved_byte: float = 0.0
) -> ProgramResult | None:
    """Return the treatments that add the least time within the budget, or None if none were found.

    Args:
        rank: The rank. Its `host_budget_bytes` holds for the bytes of all microbatches in flight.
        costs: Costs of each kind of its layers.
        budget_bytes: Budget of the device; None minimizes the peak instead of the time.
        s_per_moved_byte: Extra seconds of an offloaded byte, beside the measured costs of its layer.
    """
    program = _Program(rank, costs, s_per_moved_byte)
    program.add_memory(budget_bytes)
    return program.solve()


def count_step_s(rank: RankModel) -> float:
    """Return the seconds of a step that keeps everything and never waits."""
    step_s = rank.step_end_s
    for number, chunk in enumerate(rank.chunks):
        seconds = sum(segment.forward_pass_s + segment.backward_s for segment in _list_segments(chunk))
        step_s += seconds * count_backwards(rank.passes, chunk=number)
    return step_s


_Row = dict[int, float]
"""A linear expression: factors by number of the variable."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Chunk:
    """The variables of one chunk."""

    fixed: float
    """Bytes of a microbatch with everything kept, in the program's unit."""
    extra: int
    """Variable of the most bytes beside the kept ones."""
    last: list[tuple[TreatmentCosts, int]]
    """Treatments of the last layer with their binary variables."""
    inner: dict[str, list[tuple[TreatmentCosts, int]]]
    """Treatments of the other layers by kind, with the variables that count their layers."""

    def sum(self, name: str, unit: float) -> _Row:
        """Return the sum of a field of all layers' treatments, in a unit."""
        rows = itertools.chain(self.last, *self.inner.values())
        return {variable: getattr(one.treatment, name) / unit for one, variable in rows}


class _Program:
    """Builds the variables, rows and costs of one rank."""

    def __init__(self, rank: RankModel, costs: Mapping[str, LayerCosts], s_per_moved_byte: float) -> None:
        self._rank = rank
        self._layer_costs = costs
        self._s_per_moved_byte = s_per_moved_byte
        # HiGHS wants numbers near 1, and takes 1e-9 for 0: bytes and seconds are counted in layers.
        layers = [layer.model for chunk in rank.chunks for layer in chunk.layers]
        self._unit_bytes = float(max([1, *(layer.saved_bytes for layer in layers)]))
        self._unit_s = max([1e-6, *(layer.forward_s for layer in layers)])
        self._wait_step = _WAIT_STEPS * max((one.resolution_s for one in costs.values()), default=1.0) / self._unit_s
        self._extra_step = _EXTRA_STEPS * max((one.resolution_bytes for one in costs.values()), default=1) / self._unit_bytes
        self._bounds: list[tuple[float, float]] = []
        self._prices: list[float] = []
        self._is_whole: list[int] = []
        self._rows: list[tuple[_Row, float, float]] = []
        self._ties: _Row = {}
        # The step without a plan: HiGHS takes its gap as a part of the whole objective.
        self._step = self._add(1, 1, price=count_step_s(rank) / self._unit_s)
        self._chunks = [self._add_chunk(number, chunk) for number, chunk in enumerate(rank.chunks)]
        self._peak = -1

    def _add_chunk(self, number: int, model: ChunkModel) -> _Chunk:
        least_extra = _count_extra_bytes(model) / self._unit_bytes
        fixed = _count_fixed_bytes(model) / self._unit_bytes
        chunk = _Chunk(fixed=fixed, extra=self._add(least_extra, math.inf), last=[], inner={})
        if not model.layers:
            return chunk
        microbatches = count_backwards(self._rank.passes, chunk=number)
        last = self._layer_costs[model.layers[-1].model.kind]
        chunk.last = [(one, self._add_treatment(one, one.last, 1, microbatches)) for one in last.last]
        self._require(dict.fromkeys([variable for _, variable in chunk.last], 1.0), 1, 1)
        for kind, count in collections.Counter(layer.model.kind for layer in model.layers[:-1]).items():
            rows = [(one, self._add_treatment(one, one.inner, count, microbatches)) for one in self._layer_costs[kind].inner]
            chunk.inner[kind] = rows
            self._require(dict.fromkeys([variable for _, variable in rows], 1.0), count, count)
        self._add_first_reload(chunk, len(model.layers) - 1, microbatches)
        self._add_late_copies(chunk, model, microbatches)
        self._add_extra(chunk, model)
        return chunk

    def _add_treatment(self, one: TreatmentCosts, cost: Cost, layers: int, microbatches: int) -> int:
        tie = microbatches * one.treatment.moved_bytes * _TIE_S_PER_BYTE / self._unit_s
        added_s = cost.added_s + one.treatment.moved_bytes * self._s_per_moved_byte
        variable = self._add(0, layers, price=microbatches * added_s / self._unit_s + tie, is_whole=True)
        self._ties[variable] = tie
        return variable

    def _add_first_reload(self, chunk: _Chunk, inner_layers: int, microbatches: int) -> None:
        """Add the wait for the first reload if the last layer offloads nothing."""
        waits = [(one.first_wait_s / self._unit_s, variable) for rows in chunk.inner.values() for one, variable in rows]
        longest = max((wait for wait, _ in waits), default=0.0)
        moving = dict.fromkeys([variable for one, variable in chunk.last if one.treatment.moved_bytes], longest)
        waited = self._add(0, math.inf, price=microbatches)
        self._add_levels(waits, waited, moving, inner_layers, step=self._wait_step)

    def _add_late_copies(self, chunk: _Chunk, model: ChunkModel, microbatches: int) -> None:
        """Add the wait of a forward whose layers together offload more than the link copies meanwhile.

        Short simulations show the wait of a layer once the window is full. Layers that each offload slightly more than the link
        copies beside them fill it only in a long chunk.
        """
        places = [(one, one.last, variable) for one, variable in chunk.last]
        places += [(one, one.inner, variable) for rows in chunk.inner.values() for one, variable in rows]
        row = {self._add(0, math.inf, price=microbatches): 1.0}
        for one, cost, variable in places:
            row[variable] = (max(cost.added_s - one.treatment.recompute_s, 0.0) - cost.d2h_s) / self._unit_s
        # Time after the last layer does not count: at its end no more than a window may be in flight.
        layers = (segment for layer in model.layers for segment in layer.model.segments)
        room_s = sum(segment.forward_pass_s for segment in (*model.first, *layers))
        room_s += self._rank.policy.window_bytes / self._rank.link.d2h_bytes_per_s
        self._require(row, -room_s / self._unit_s, math.inf)

    def _add_extra(self, chunk: _Chunk, model: ChunkModel) -> None:
        """Bound the bytes beside the kept ones by those of the layer that has most."""
        saved_bytes = model.layers[-1].model.saved_bytes
        freed = {}
        for one, variable in chunk.last:
            self._require({chunk.extra: 1.0, variable: -one.last.extra_bytes / self._unit_bytes}, 0, math.inf)
            # When backward is in earlier layers, the last one's kept bytes are freed.
            freed[variable] = (saved_bytes + one.treatment.kept_bytes) / self._unit_bytes
        sizes = [
            (one.inner.extra_bytes / self._unit_bytes, variable) for rows in chunk.inner.values() for one, variable in rows
        ]
        self._add_levels(sizes, chunk.extra, freed, len(model.layers) - 1, step=self._extra_step)

    def _add_levels(self, amounts: Sequence[tuple[float, int]], most: int, less: _Row, layers: int, *, step: float) -> None:
        """Bound the variable `most` from below by the largest amount of any layer, less `less`.

        Args:
            amounts: Amounts with the variables that count their layers.
            most: The variable.
            less: An expression.
            layers: Number of layers.
            step: Amounts are rounded to multiples of it, each with a binary variable.
        """
        rounded = [(round(amount / step), variable) for amount, variable in amounts]
        for level in sorted({steps for steps, _ in rounded if steps > 0}):
            variables = [variable for steps, variable in rounded if steps >= level]
            has_any = self._add(0, 1, is_whole=True)
            self._require({has_any: float(layers), **dict.fromkeys(variables, -1.0)}, 0, math.inf)
            self._require({**less, most: 1.0, has_any: -level * step}, 0, math.inf)

    def add_memory(self, budget_bytes: int | None) -> None:
        """Bound each peak time by the budget, or minimize the largest one if the budget is None."""
        upper = math.inf if budget_bytes is None else budget_bytes / self._unit_bytes
        # Without a budget the peak counts before time: a gigabyte is worth a thousand seconds.
        self._peak = self._add(0, upper, price=1e6 if budget_bytes is None else 0.0)
        times = list_peak_times(self._rank.passes, len(self._rank.chunks))
        for in_flight, backward in times:
            row, fixed = self._sum_in_flight(in_flight, "kept_bytes")
            if backward is not None:
                row[self._chunks[backward].extra] = 1.0
            row[self._peak] = -1.0
            self._require(row, -math.inf, -fixed - self._rank.static_bytes / self._unit_bytes)
        if self._rank.host_budget_bytes is not None:
            for in_flight in list_largest({time.in_flight for time in times}):
                row, _ = self._sum_in_flight(in_flight, "moved_bytes")
                self._require(row, -math.inf, self._rank.host_budget_bytes / self._unit_bytes)

    def _sum_in_flight(self, in_flight: Sequence[int], name: str) -> tuple[_Row, float]:
        """Return the sum of a field over microbatches in flight as an expression, and its fixed part."""
        row: _Row = {}
        for microbatches, chunk in zip(in_flight, self._chunks, strict=True):
            row |= {variable: microbatches * factor for variable, factor in chunk.sum(name, self._unit_bytes).items()}
        return row, sum(count * chunk.fixed for count, chunk in zip(in_flight, self._chunks, strict=True))

    def solve(self) -> ProgramResult | None:
        """Solve by HiGHS: relaxed first, then with integers and without variables that the relaxed solution prices out."""
        import numpy as np
        import scipy.optimize
        import scipy.sparse

        places = [(row, variable, factor) for row, (sums, _, _) in enumerate(self._rows) for variable, factor in sums.items()]
        rows, columns, factors = zip(*places, strict=True)
        matrix = scipy.sparse.csr_array((factors, (rows, columns)), shape=(len(self._rows), len(self._prices)))
        low, high = (np.array([row[side] for row in self._rows]) for side in (1, 2))
        prices, bounds, is_whole = np.array(self._prices), np.array(self._bounds), np.array(self._is_whole)
        relaxed = scipy.optimize.linprog(
            prices,
            A_ub=scipy.sparse.vstack([matrix[high < math.inf], -matrix[low > -math.inf]]),
            b_ub=np.concatenate([high[high < math.inf], -low[low > -math.inf]]),
            bounds=bounds,
        )
        if relaxed.x is None:
            return None
        left_out = (is_whole == 1) & (relaxed.lower.marginals > _GAP * relaxed.fun)
        for upper in (np.where(left_out, bounds[:, 0], bounds[:, 1]), bounds[:, 1]):
            solved = scipy.optimize.milp(
                prices,
                integrality=is_whole,
                bounds=scipy.optimize.Bounds(bounds[:, 0], upper),
                constraints=scipy.optimize.LinearConstraint(matrix, low, high),
                options={"mip_rel_gap": _GAP, "node_limit": _MOST_NODES},
            )
            if solved.x is not None:
                return self._read(solved.x, float(solved.fun))
        return None

    def _read(self, solution: Sequence[float], price: float) -> ProgramResult:
        fixed = solution[self._peak] * self._prices[self._peak] + self._prices[self._step]
        fixed += sum(solution[variable] * tie for variable, tie in self._ties.items())
        return ProgramResult(
            chunks=tuple(_read_chunk(chunk, solution) for chunk in self._chunks),
            added_s=(price - fixed) * self._unit_s,
        )

    def _add(self, lower: float, upper: float, *, price: float = 0.0, is_whole: bool = False) -> int:
        self._bounds.append((lower, upper))
        self._prices.append(price)
        self._is_whole.append(int(is_whole))
        return len(self._prices) - 1

    def _require(self, row: _Row, lower: float, upper: float) -> None:
        self._rows.append((row, lower, upper))


def _read_chunk(chunk: _Chunk, solution: Sequence[float]) -> ChunkCounts:
    return ChunkCounts(
        last=next((one.treatment for one, variable in chunk.last if round(solution[variable])), None),
        inner={
            kind: tuple((one.treatment, round(solution[variable])) for one, variable in rows if round(solution[variable]))
            for kind, rows in chunk.inner.items()
        },
    )


def _count_fixed_bytes(chunk: ChunkModel) -> int:
    """Return the bytes of a microbatch in a chunk that keeps everything; storages that all layers share count once."""
    shared = {
        tensor.name: tensor.size_bytes
        for layer in chunk.layers
        for tensor in layer.model.tensors
        if tensor.is_same_in_all_layers
    }
    return chunk.saved_bytes + sum(layer.model.saved_bytes for layer in chunk.layers) + sum(shared.values())


def _count_extra_bytes(chunk: ChunkModel) -> int:
    """Return the most temporary bytes of the segments before and after the layers."""
    ends = (*chunk.first, *chunk.last)
    return max((max(segment.forward_extra_bytes, segment.backward_extra_bytes) for segment in ends), default=0)


def _list_segments(chunk: ChunkModel) -> Iterator[Segment]:
    yield from chunk.first
    for layer in chunk.layers:
        yield from layer.model.segments
    yield from chunk.last
