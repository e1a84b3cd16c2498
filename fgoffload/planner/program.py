"""The solver's mixed-integer program: how many layers of each kind make which choice, at the least added time.

One program is one rank. Its whole numbers are, for each chunk and kind of layer, how many layers are in each mode, and how many
of those make each choice of each part; layers of one kind in one chunk are alike here, and `placement` tells them apart. Beside
them are, in bytes, what is still on its way to the host between two passes and what is back ahead of the second, and for each
kind of pass the seconds that copies take longer than compute.

    least   seconds of recompute + seconds that copies take longer + seconds that they slow compute
    so that at each moment    static + what the microbatches in flight keep + on the way + back ahead + back from recompute
                              is at most the budget
    and that in each span     copies to the host = what forward sends + on the way before - on the way behind,
                              copies to the device = what backward needs - back ahead before + back ahead behind,
                              together at the link's rates, at most compute + recompute + the seconds that it takes longer

Where in a pass a layer lies is not in it: the simulator has the last word, and tells how far the program was off.
Solved by HiGHS, through `scipy.optimize.milp`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import scipy.optimize
import scipy.sparse

from fgoffload.planner.choices import Choice, Mode, drop_dominated
from fgoffload.planner.layer_model import Segment
from fgoffload.planner.rank_model import ChunkModel, RankModel
from fgoffload.planner.schedule import PassKind
from fgoffload.planner.spans import Gap, Moment, Span, count_backwards, list_largest, list_moments, list_spans

_SCALE_BYTES = 1e9
"""Bytes of one unit of the program, and it counts milliseconds: HiGHS wants numbers near 1."""
_SCALE_S = 1e-3

_DEFAULT_GAP = 1e-3
"""Of the step: how far from the best HiGHS may stop. It is a tenth of what predictions are off, and saves most of its time."""

_TIE = 1e-4
"""What a second of copies costs that hides behind compute: of plans that are equally fast, the one that moves less."""

_RESOLUTION_PARTS = 200
"""Choices that differ by less than this part of a layer's bytes are one to the program: it is faster so, and the search that
comes after it has them all."""

_LEAST_RETURNED_BYTES = 32 * 1024 * 1024
"""What comes back for less is no decision of its own: the simulator corrects it, and each decision makes the program slower."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModeCount:
    """Layers of one kind in one chunk that are in one mode."""

    mode: Mode
    """What runs again, over several parts."""
    layers: int
    """How many."""
    parts: tuple[tuple[tuple[Choice, int], ...], ...]
    """By part: how many of them make which choice. They add up to `layers`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """What a program came to. Its figures are no predictions: those are the simulator's."""

    counts: Mapping[tuple[int, str], tuple[ModeCount, ...]]
    """By chunk and kind of layer."""
    added_s: float
    """Seconds that the program expects the plan to add to a step."""
    bound_s: float
    """No choice adds less, as the program counts: with `added_s` the gap that HiGHS left."""
    peak_bytes: int
    """The most at any moment, as the program counts."""


def solve_program(
    rank: RankModel,
    modes: Mapping[str, Sequence[Mode]],
    *,
    budget_bytes: int | None,
    gap: float = _DEFAULT_GAP,
    time_limit_s: float = math.inf,
) -> ProgramResult | None:
    """Return the choices that add the least time within the budget, or None where there are none, or none was found.

    Args:
        rank: The rank. Its `host_budget_bytes` holds for the bytes of all microbatches in flight.
        modes: What each kind of its layers may choose from.
        budget_bytes: Of the device. None asks for the least peak instead of the least time.
        gap: How far from the best the result may be, as a part of the time of a step.
        time_limit_s: For HiGHS. With the best that was found until then; a result may then differ from run to run.
    """
    program = _Program(rank, modes)
    program.add_choices()
    program.add_spans()
    program.add_memory(budget_bytes)
    return program.solve(gap, time_limit_s)


class _Row(dict[int, float]):
    """A sum of variables times numbers, by number of the variable; and `constant`, what is added."""

    constant: float = 0.0

    def add(self, other: "_Row", times: float = 1.0) -> "_Row":
        for variable, factor in other.items():
            self[variable] = self.get(variable, 0.0) + factor * times
        self.constant += other.constant * times
        return self


class _Program:
    """The variables, rows and costs of one rank, while they are put together."""

    def __init__(self, rank: RankModel, modes: Mapping[str, Sequence[Mode]]) -> None:
        self._rank = rank
        models = {layer.model.kind: layer.model for chunk in rank.chunks for layer in chunk.layers}
        self._modes = {
            kind: tuple(_make_efficient(mode, model.saved_bytes // _RESOLUTION_PARTS) for mode in modes[kind])
            for kind, model in models.items()
        }
        self._whole_modes = modes
        self._spans = list_spans(rank.passes)
        self._moments = list_moments(rank.passes, chunks=len(rank.chunks))
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._costs: list[float] = []
        self._is_whole: list[int] = []
        self._rows: list[tuple[_Row, float, float]] = []
        self._layers: dict[tuple[int, str, int], int] = {}
        self._choices: dict[tuple[int, str, int, int, int], int] = {}
        self._kept = [_Row() for _ in rank.chunks]
        self._moved = [_Row() for _ in rank.chunks]
        self._copied = [_Row() for _ in rank.chunks]
        self._recompute = [_Row() for _ in rank.chunks]
        self._returned = [0 for _ in rank.chunks]
        self._on_way: dict[Gap, int] = {}
        self._ahead: dict[Gap, int] = {}
        self._peak = -1

    # Choices.

    def add_choices(self) -> None:
        """Add how many layers make which choice, and what each chunk comes to then."""
        for number, chunk in enumerate(self._rank.chunks):
            returning: dict[int, _Row] = {}
            for kind, layers in count_kinds(chunk).items():
                total = _Row()
                for place, mode in enumerate(self._modes[kind]):
                    total[self._add_mode(number, kind, place, mode, layers, returning)] = 1.0
                self._require(total, layers, layers)
            self._kept[number].constant += _count_fixed_bytes(chunk) / _SCALE_BYTES
            self._returned[number] = self._add_returned(returning, len(chunk.layers))
            microbatches = count_backwards(self._rank.passes, chunk=number)
            self._charge(self._recompute[number], microbatches)
            self._charge(self._copied[number], microbatches * self._get_copy_cost())

    def _add_mode(self, chunk: int, kind: str, place: int, mode: Mode, layers: int, returning: dict[int, _Row]) -> int:
        in_mode = self._add(0, layers, is_whole=True)
        self._layers[chunk, kind, place] = in_mode
        self._count(chunk, mode.base, in_mode, returning)
        for part, choices in enumerate(mode.parts):
            total = _Row({in_mode: -1.0})
            for number, choice in enumerate(choices):
                variable = self._add(0, layers, is_whole=True)
                self._choices[chunk, kind, place, part, number] = variable
                total[variable] = 1.0
                self._count(chunk, choice, variable, returning)
            self._require(total, 0, 0)
        return in_mode

    def _count(self, chunk: int, choice: Choice, variable: int, returning: dict[int, _Row]) -> None:
        """Let each layer that `variable` counts keep, move and run again what `choice` does."""
        link = self._rank.link
        self._kept[chunk][variable] = choice.kept_bytes / _SCALE_BYTES
        self._moved[chunk][variable] = choice.moved_bytes / _SCALE_BYTES
        # What a copy waits before its bytes move is as good as so many bytes more.
        latency_bytes = choice.groups * link.copy_latency_s * link.d2h_bytes_per_s
        self._copied[chunk][variable] = (choice.moved_bytes + latency_bytes) / _SCALE_BYTES
        self._recompute[chunk][variable] = choice.recompute_s / _SCALE_S
        if choice.returned_bytes >= _LEAST_RETURNED_BYTES:
            returning.setdefault(choice.returned_bytes, _Row())[variable] = 1.0

    def _add_returned(self, returning: Mapping[int, _Row], layers: int) -> int:
        """Return the variable of the most bytes that recompute has back on the device at once."""
        most = self._add(0, max(returning, default=0) / _SCALE_BYTES)
        for size_bytes, variables in returning.items():
            # Whether any layer has so much back: those that do are at most as many as there are, times that.
            used = self._add(0, 1, is_whole=True)
            self._require(_Row(variables).add(_Row({used: -float(layers * len(variables))})), -math.inf, 0)
            self._require(_Row({used: size_bytes / _SCALE_BYTES, most: -1.0}), -math.inf, 0)
        return most

    def _get_copy_cost(self) -> float:
        """Return what a unit of bytes costs that goes out and comes back, in units of time, hidden or not."""
        link = self._rank.link
        seconds = _SCALE_BYTES / link.d2h_bytes_per_s + _SCALE_BYTES / link.h2d_bytes_per_s
        return seconds * (link.compute_slowdown + _TIE) / _SCALE_S

    # Spans.

    def add_spans(self) -> None:
        """Add what is on its way between passes, and the seconds that copies take longer than each kind of pass."""
        policy = self._rank.policy
        for span in self._spans:
            for gap in (span.before, span.after):
                if gap not in self._on_way:
                    is_inside = gap.before is not None and gap.after is not None
                    self._on_way[gap] = self._add(0, policy.window_bytes / _SCALE_BYTES if is_inside else 0)
                    self._ahead[gap] = self._add(0, policy.prefetch_bytes / _SCALE_BYTES if is_inside else 0)
        for span in self._spans:
            self._add_span(span)

    def _add_span(self, span: Span) -> None:
        kind, chunk = span.way
        out = _Row({self._on_way[span.before]: 1.0}).add(_Row({self._on_way[span.after]: -1.0}))
        back = _Row({self._ahead[span.after]: 1.0}).add(_Row({self._ahead[span.before]: -1.0}))
        compute = _Row()
        if kind is PassKind.FORWARD:
            out.add(self._copied[chunk])
        else:
            back.add(self._copied[chunk])
            compute.add(self._recompute[chunk])
        compute.constant += _count_pass_s(self._rank.chunks[chunk], kind) / _SCALE_S
        longer = self._add(0, math.inf, cost=span.times)
        self._require(out, 0, math.inf)
        self._require(back, 0, math.inf)
        compute[longer] = 1.0
        link = self._rank.link
        for first, second, rate in ((out, back, link.d2h_bytes_per_s), (back, out, link.h2d_bytes_per_s)):
            # Of two copies that run at once the longer one is alone at the end: it has moved as much as the other at the rate
            # of both by then, and the rest goes at its own.
            both, alone = _SCALE_BYTES / link.duplex_bytes_per_s / _SCALE_S, _SCALE_BYTES / rate / _SCALE_S
            self._require(_Row().add(first, alone).add(second, max(both - alone, 0.0)).add(compute, -1.0), -math.inf, 0)

    # Memory.

    def add_memory(self, budget_bytes: int | None) -> None:
        """Hold each moment to the budget, or, where it is None, make the largest of them as small as it can be."""
        upper = math.inf if budget_bytes is None else budget_bytes / _SCALE_BYTES
        # The least peak counts before any time: a gigabyte is worth a step of any length. With a budget it is worth nothing.
        self._peak = self._add(0, upper, cost=1e6 if budget_bytes is None else 0.0)
        for moment in self._moments:
            row = self._make_memory_row(moment)
            row[self._peak] = row.get(self._peak, 0.0) - 1.0
            self._require(row, -math.inf, 0)
        if self._rank.host_budget_bytes is not None:
            for in_flight in list_largest({moment.in_flight for moment in self._moments}):
                row = _Row()
                for microbatches, moved in zip(in_flight, self._moved, strict=True):
                    row.add(moved, microbatches)
                self._require(row, -math.inf, self._rank.host_budget_bytes / _SCALE_BYTES)

    def _make_memory_row(self, moment: Moment) -> _Row:
        row = _Row()
        row.constant += self._rank.static_bytes / _SCALE_BYTES
        for microbatches, kept in zip(moment.in_flight, self._kept, strict=True):
            row.add(kept, microbatches)
        row[self._on_way[moment.gap]] = 1.0
        if moment.gap.after is None or moment.gap.after[0] is PassKind.FORWARD:
            return row
        chunk = moment.gap.after[1]
        row[self._ahead[moment.gap]] = 1.0
        row[self._returned[chunk]] = 1.0
        row.constant += _count_extra_bytes(self._rank.chunks[chunk]) / _SCALE_BYTES
        return row

    # The program as a whole.

    def solve(self, gap: float, time_limit_s: float) -> ProgramResult | None:
        """Hand it to HiGHS."""
        # HiGHS takes a gap as a part of the whole objective, so the time of the step without any plan is in it.
        step = self._add(1, 1, cost=self._count_step_s() / _SCALE_S)
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
        bound = solved.mip_dual_bound if solved.mip_dual_bound is not None else solved.fun
        fixed = solved.x[self._peak] * self._costs[self._peak] + self._costs[step]
        return ProgramResult(
            counts=self._read_counts(solved.x),
            added_s=float(solved.fun - fixed) * _SCALE_S,
            bound_s=float(bound - fixed) * _SCALE_S,
            peak_bytes=self._read_peak(solved.x),
        )

    def _count_step_s(self) -> float:
        passes = (span.times * _count_pass_s(self._rank.chunks[span.way[1]], span.way[0]) for span in self._spans)
        return sum(passes) + self._rank.step_end_s

    def _make_constraints(self) -> scipy.optimize.LinearConstraint:
        places = [(row, variable, factor) for row, (sums, _, _) in enumerate(self._rows) for variable, factor in sums.items()]
        rows, columns, factors = zip(*places, strict=True)
        matrix = scipy.sparse.csr_array((factors, (rows, columns)), shape=(len(self._rows), len(self._costs)))
        lower = [low - sums.constant for sums, low, _ in self._rows]
        upper = [high - sums.constant for sums, _, high in self._rows]
        return scipy.optimize.LinearConstraint(matrix, lower, upper)

    def _read_counts(self, solution: Sequence[float]) -> dict[tuple[int, str], tuple[ModeCount, ...]]:
        counts: dict[tuple[int, str], list[ModeCount]] = {}
        for (chunk, kind, place), variable in self._layers.items():
            layers = round(solution[variable])
            if not layers:
                continue
            mode = self._modes[kind][place]
            parts = []
            for part, choices in enumerate(mode.parts):
                found = [round(solution[self._choices[chunk, kind, place, part, i]]) for i in range(len(choices))]
                parts.append(tuple((choice, count) for choice, count in zip(choices, found, strict=True) if count))
            count = ModeCount(mode=self._whole_modes[kind][place], layers=layers, parts=tuple(parts))
            counts.setdefault((chunk, kind), []).append(count)
        return {key: tuple(found) for key, found in counts.items()}

    def _read_peak(self, solution: Sequence[float]) -> int:
        most = 0.0
        for moment in self._moments:
            row = self._make_memory_row(moment)
            most = max(most, row.constant + sum(solution[variable] * factor for variable, factor in row.items()))
        return round(most * _SCALE_BYTES)

    def _add(self, lower: float, upper: float, *, cost: float = 0.0, is_whole: bool = False) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self._costs.append(cost)
        self._is_whole.append(int(is_whole))
        return len(self._costs) - 1

    def _charge(self, row: _Row, times: float) -> None:
        for variable, factor in row.items():
            self._costs[variable] += factor * times

    def _require(self, row: _Row, lower: float, upper: float) -> None:
        self._rows.append((row, lower, upper))


def count_kinds(chunk: ChunkModel) -> dict[str, int]:
    """Return how many layers of each kind a chunk has."""
    counts: dict[str, int] = {}
    for layer in chunk.layers:
        counts[layer.model.kind] = counts.get(layer.model.kind, 0) + 1
    return counts


def _make_efficient(mode: Mode, resolution_bytes: int) -> Mode:
    parts = (drop_dominated(part, resolution_bytes=max(resolution_bytes, 1)) for part in mode.parts)
    return Mode(base=mode.base, parts=tuple(parts))


def _list_segments(chunk: ChunkModel) -> Iterable[Segment]:
    yield from chunk.first
    for layer in chunk.layers:
        yield from layer.model.segments
    yield from chunk.last


def _count_pass_s(chunk: ChunkModel, kind: PassKind) -> float:
    if kind is PassKind.FORWARD:
        return sum(segment.forward_s for segment in _list_segments(chunk))
    return sum(segment.backward_s for segment in _list_segments(chunk))


def _count_fixed_bytes(chunk: ChunkModel) -> int:
    """Return what a microbatch keeps in a chunk where its layers keep all, with what all layers share counted once."""
    shared = {
        tensor.name: tensor.size_bytes
        for layer in chunk.layers
        for tensor in layer.model.tensors
        if tensor.is_same_in_all_layers
    }
    return chunk.saved_bytes + sum(layer.model.saved_bytes for layer in chunk.layers) + sum(shared.values())


def _count_extra_bytes(chunk: ChunkModel) -> int:
    """Return the most that compute has beside what is saved, while a pass begins its backward or ends its forward."""
    last = chunk.last or (chunk.layers[-1].model.segments if chunk.layers else chunk.first)
    return max((max(segment.forward_extra_bytes, segment.backward_extra_bytes) for segment in last), default=0)
