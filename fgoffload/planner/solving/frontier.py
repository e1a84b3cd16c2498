"""What each way to treat a layer costs, by short simulations, and which ways are worth having.

The program of a rank needs a number for the seconds that a layer's copies and recompute add. How much of a copy hides depends
on where in the layer its group ends and is asked for, on the window and on prefetch. So the simulator is asked: each candidate
runs a few microbatches alone in a chunk, and several times in a chunk. What one more adds is what a layer costs among others;
what one alone costs is what the last layer of a chunk does, whose copies no backward before it could announce.

    [Note: What a short simulation leaves out]
    Layers of one chunk are taken to do the same as their neighbours, and chunks to run beside themselves. A layer that moves
    much next to one that moves little costs less than is counted here, and one stage alone, whose last layers are called back
    before they have left, costs otherwise. The simulation of the whole rank corrects both.

    [Note: Layers that are watched]
    Where what leaves makes the engine watch or follow a layer (`fgoffload.watched`), whatever backward takes there tells how
    far it has come. Where a layer is one of few of its chunk that hides most of the first copy back, which nothing else
    announces: alone in a chunk one of Mixtral 8x7B adds 1.0 ms with its router among what leaves, and 3.5 ms without, for as
    many bytes. So there both kinds of ways are worth a measurement: it made plans of DeepSeek V3 (two layers a chunk) up to
    2.3% faster, and of Qwen3-235B (three) up to 0.7%. But what the last layer calls back goes first; where the layers before it
    want theirs early these are late, which short simulations of layers that do the same do not show: a program whose plan is
    late is solved again without such ways for last layers. In long chunks the layers behind announce what comes; to watch gains
    little, and takes host time that the simulator does not count: of equal ways one that is not watched is measured.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence

from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer, RankModel
from fgoffload.planner.ranks.schedule import Pipeline, list_passes
from fgoffload.planner.simulation.simulation_result import RankResult
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.choices import Configuration, Mode
from fgoffload.planner.solving.host_work import find_watched_ops
from fgoffload.planner.solving.ways import list_ways
from fgoffload.planner.worker_processes import map_in_processes

_MICROBATCHES = 4
_PIPELINE = Pipeline(stages=2, microbatches=_MICROBATCHES)
"""The short schedule, of its first rank: two microbatches in flight, and a forward and a backward in turn."""
_IN_FLIGHT = 2

_MOST_LAYERS = 8
"""Layers of a short simulation, of chunks that have more. A window of 1 GiB is full before, or a layer moves little."""

_RESOLUTION_PARTS = 64
"""Ways that differ by less than this part of a layer's bytes, and of its forward, are one: moves find the rest."""
_ALIKE_PARTS = 24
"""Ways of which a program has one are coarser still: twice as many make it twice as slow and its plans no better."""
_ALIKE_PARTS_OF_SHORT, _ALIKE_PARTS_OF_SINGLE = 14, 20
"""The same in several short chunks, and in several of one layer. Programs of these are large: what they come to takes less than
half as long, and most plans are faster by it. Where a layer is all of a chunk
coarser ones cost up to 2% of a step."""
_MOST_CANDIDATES = 200
"""Ways of one kind of layer that are simulated; with more, the resolution is halved. Each takes two milliseconds."""
SHORT_CHUNK = 3
"""Layers. In longer chunks only one kind of ways is measured. See [Note: Layers that are watched]."""
_MOST_OF_BOTH = 320
"""The same in short chunks, where watched ways are measured beside others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a way to treat a layer costs in one place of a chunk. Of one microbatch."""

    added_s: float
    """Seconds that forward and backward take longer than where all is kept."""
    d2h_s: float
    """Seconds in which its copies to the host run."""
    extra_bytes: int
    """The most on the device beside what microbatches in flight keep: on its way, back again, and what compute has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPoint:
    """A way to treat a layer, and what it costs."""

    configuration: Configuration
    """The way."""
    kept_bytes: int
    """What it keeps of a microbatch, from forward to backward."""
    inner: Place
    """Among other layers that do the same."""
    last: Place
    """As the last layer of a chunk, with which backward begins."""

    @property
    def first_wait_s(self) -> float:
        """Seconds that its first copy back is waited for where no layer behind it has announced it."""
        return max(self.last.added_s - self.inner.added_s, 0.0) if self.configuration.moved_bytes else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPoints:
    """What is worth having of the ways to treat a kind of layer."""

    every: tuple[LayerPoint, ...]
    """All that were measured. The first keeps all."""
    inner: tuple[LayerPoint, ...]
    """Those that may be best among other layers, for some budget; none of a kind that is the last one wherever it is."""
    last: tuple[LayerPoint, ...]
    """Those that may be best for the last layer of a chunk."""
    last_unwatched: tuple[LayerPoint, ...]
    """The same of those that have the engine watch no layer. See [Note: Layers that are watched]."""
    resolution_s: float
    """Seconds of a microbatch: ways that differ by less are one to a program."""
    resolution_bytes: int
    """Bytes of a microbatch, likewise."""


def measure_layer(rank: RankModel, layer: LayerModel, modes: Sequence[Mode], *, is_inner: bool = True) -> LayerPoints:
    """Return what the ways to treat a kind of layer cost that may be best for some budget.

    Args:
        rank: Says what the link and the engine's rules are, and whether there is a host budget to save.
        layer: The kind.
        modes: All that it may choose from.
        is_inner: Whether one is before another layer in any chunk. What it costs there is not measured otherwise.
    """
    longest = max((len(chunk.layers) for chunk in rank.chunks), default=0)
    nothing = Configuration(mode=modes[0], chosen=tuple(part[0] for part in modes[0].parts))
    # What frees much in little time may move more than others that free as much: rules of thumb know some of those.
    rules = list_ways(modes) if longest == 1 else []
    candidates = list(
        dict.fromkeys([nothing, *list_candidates(layer, modes, longest=longest, group_s=rank.late_group_s), *rules])
    )
    costs = map_in_processes(functools.partial(_measure, rank, layer, is_inner=is_inner), candidates)
    base = costs[0]
    points = [
        LayerPoint(
            configuration=one,
            kept_bytes=layer.saved_bytes + one.kept_bytes,
            inner=_subtract(inner, base[0]),
            last=_subtract(last, base[1]),
        )
        for one, (inner, last) in zip(candidates, costs, strict=True)
    ]
    parts = _ALIKE_PARTS
    if longest <= SHORT_CHUNK and len(rank.chunks) > 1:
        parts = _ALIKE_PARTS_OF_SINGLE if longest == 1 else _ALIKE_PARTS_OF_SHORT
    best = pick_best(layer, points, saves_host=rank.host_budget_bytes is not None, parts=parts)
    return best if is_inner else dataclasses.replace(best, inner=())


def pick_best(layer: LayerModel, points: Sequence[LayerPoint], *, saves_host: bool, parts: int = _ALIKE_PARTS) -> LayerPoints:
    """Return `points`, and which of them may be best where.

    Args:
        layer: A kind of layer.
        points: Its own. The first keeps all, and is among the best everywhere.
        saves_host: Whether bytes that leave are bytes to save.
        parts: Ways that differ by less than such a part of the layer's bytes, and of its forward, are one.
    """
    resolution_s = max(layer.forward_s / parts, 1e-9)
    resolution_bytes = max(layer.saved_bytes // parts, 1)

    def find(points: Sequence[LayerPoint], places: Sequence[Place], others: Sequence[float]) -> tuple[LayerPoint, ...]:
        costs = [
            (
                round(place.added_s / resolution_s),
                round(point.kept_bytes / resolution_bytes),
                round(place.extra_bytes / resolution_bytes),
                round(point.configuration.moved_bytes / resolution_bytes) if saves_host else 0,
                other,
            )
            for point, place, other in zip(points, places, others, strict=True)
        ]
        return tuple(points[place] for place in sorted({0, *find_efficient(costs)}))

    def find_last(points: Sequence[LayerPoint]) -> tuple[LayerPoint, ...]:
        # A last layer that moves something spares the layers before it the wait for the first copy.
        return find(points, [one.last for one in points], [not one.configuration.moved_bytes for one in points])

    return LayerPoints(
        every=tuple(points),
        inner=find(points, [one.inner for one in points], [round(one.first_wait_s / resolution_s / 4) for one in points]),
        last=find_last(points),
        last_unwatched=find_last([one for one in points if not _is_watched(layer, one.configuration)]),
        resolution_s=resolution_s,
        resolution_bytes=resolution_bytes,
    )


def list_candidates(layer: LayerModel, modes: Sequence[Mode], *, longest: int, group_s: float = 0.0) -> list[Configuration]:
    """Return the ways to treat a layer of which none is better in bytes kept, bytes moved and what it computes longer.

    Args:
        layer: A kind of layer.
        modes: All that it may choose from.
        longest: Layers of the longest chunk of its rank. See [Note: Layers that are watched].
        group_s: Seconds that each group that leaves costs its host.
    """
    parts = _RESOLUTION_PARTS
    most = _MOST_OF_BOTH if longest <= SHORT_CHUNK else _MOST_CANDIDATES
    while True:
        found = _list_candidates(layer, modes, parts, longest, group_s)
        if len(found) <= most or parts == 1:
            return found
        parts = max(parts // 2, 1)


def find_efficient(costs: Sequence[Sequence[float]]) -> list[int]:
    """Return the places of those rows that no other row is at most as large as in all columns; of equal rows the first."""
    import numpy as np  # a tenth of a second, in which another process looks for flags

    table = np.array(costs, dtype=float)
    order = np.lexsort(table.T[::-1])
    efficient: list[int] = []
    found = np.empty_like(table)
    # In this order whatever is at most as large as a row is before it.
    for place in order:
        row, count = table[place], len(efficient)
        if not (found[:count] <= row).all(axis=1).any():
            found[count] = row
            efficient.append(int(place))
    return sorted(efficient)


def _list_candidates(layer: LayerModel, modes: Sequence[Mode], parts: int, longest: int, group_s: float) -> list[Configuration]:
    found: list[Configuration] = []
    for mode in modes:
        configurations = [Configuration(mode=mode, chosen=())]
        for part in mode.parts:
            longer = [Configuration(mode=mode, chosen=(*one.chosen, choice)) for one in configurations for choice in part]
            # What is worse by now stays worse: what the other parts add is the same.
            configurations = _keep_efficient(layer, longer, parts, longest, group_s)
        found += configurations
    return _keep_efficient(layer, found, parts, longest, group_s)


def _keep_efficient(
    layer: LayerModel, found: Sequence[Configuration], parts: int, longest: int, group_s: float
) -> list[Configuration]:
    resolution_bytes = max(layer.saved_bytes // parts, 1)
    resolution_s = max(layer.forward_s / parts, 1e-9)
    costs: dict[tuple[int, ...], Configuration] = {}
    watched = [_is_watched(layer, one) for one in found]
    for is_watched, one in sorted(zip(watched, found, strict=True), key=operator.itemgetter(0)):
        cost: tuple[int, ...] = (
            round((one.recompute_s + one.groups * group_s) / resolution_s),
            round(one.kept_bytes / resolution_bytes),
            round(one.moved_bytes / resolution_bytes),
        )
        if longest <= SHORT_CHUNK:
            cost = (*cost, is_watched, not is_watched)  # neither is better than the other
        costs.setdefault(cost, one)
    rows = list(costs)
    return [costs[rows[place]] for place in find_efficient(rows)]


def _is_watched(layer: LayerModel, configuration: Configuration) -> bool:
    """Return whether the engine watches or follows a whole layer. See [Note: Layers that are watched]."""
    return find_watched_ops(layer, configuration).covers_layer


def _measure(rank: RankModel, layer: LayerModel, configuration: Configuration, *, is_inner: bool) -> tuple[Place, Place]:
    """Return what a way to treat a layer comes to among others, and as the last layer of a chunk: not yet what it adds.

    The same twice where it is not among others.
    """
    few, many = _count_layers(rank)
    # Of chunks with two or three layers the shorter one is one alone.
    results = {layers: _simulate(rank, layer, configuration, layers) for layers in ({1, few, many} if is_inner else {1})}
    alone = results[1]
    kept_bytes = layer.saved_bytes + configuration.kept_bytes
    last = Place(
        added_s=alone.step_s / _MICROBATCHES,
        d2h_s=alone.d2h_s / _MICROBATCHES,
        extra_bytes=alone.peak_bytes - _IN_FLIGHT * kept_bytes,
    )
    if not is_inner:
        return last, last
    shorter, longer = results[few], results[many]
    inner = Place(
        added_s=(longer.step_s - shorter.step_s) / _MICROBATCHES / (many - few),
        d2h_s=(longer.d2h_s - shorter.d2h_s) / _MICROBATCHES / (many - few),
        extra_bytes=longer.peak_bytes - many * _IN_FLIGHT * kept_bytes,
    )
    return inner, last


def _count_layers(rank: RankModel) -> tuple[int, int]:
    """Return the layers of two chunks whose difference says what a layer costs among others, in chunks like those of `rank`.

    What is on its way or ahead hides a burst of copies, and not what goes on for as long as a long chunk takes. So of a long
    chunk the second half counts, by when the window is full.
    """
    many = min(max([2, *(len(chunk.layers) for chunk in rank.chunks)]), _MOST_LAYERS)
    return many // 2, many


def _subtract(place: Place, base: Place) -> Place:
    """Return `place` with the seconds that it takes longer than `base`."""
    return dataclasses.replace(place, added_s=max(place.added_s - base.added_s, 0.0))


def _simulate(rank: RankModel, layer: LayerModel, configuration: Configuration, layers: int) -> RankResult:
    actions: dict[Site, Action] = {
        Site(chunk=0, layer=number, tag=tag): action for number in range(layers) for tag, action in configuration.actions
    }
    short = RankModel(
        rank=0,
        static_bytes=0,
        chunks=(ChunkModel(layers=tuple(NumberedLayer(number=number, model=layer) for number in range(layers))),),
        passes=list_passes(_PIPELINE, rank=0),
        link=rank.link,
        policy=rank.policy,
        min_offloaded_numel=rank.min_offloaded_numel,
        late_group_s=rank.late_group_s,
    )
    return simulate_rank(short, OffloadPlan(actions=actions))
