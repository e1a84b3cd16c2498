"""Costs of layer treatments, seconds and device bytes, by short simulations.

How much of a copy hides depends on where in the layer its group ends and is needed, on the window and on prefetch. So each
treatment is simulated for a few microbatches, with one layer in a chunk and with several. The difference per layer is its cost
among others. One layer alone costs as much as the last one of a chunk, whose copies no earlier backward announces. Neighbours
with other treatments change both; the simulation of the whole rank corrects for that.
"""

import dataclasses
from collections.abc import Sequence

from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import ChunkModel, NumberedLayer, RankModel
from fgoffload.planner.ranks.schedule import Pipeline, list_passes
from fgoffload.planner.simulation.simulation_result import RankResult
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.treatments import Treatment, find_efficient

_MICROBATCHES = 4
_PIPELINE = Pipeline(stages=2, microbatches=_MICROBATCHES)
"""The short schedule of its first rank: two microbatches in flight, forwards and backwards alternate."""
_IN_FLIGHT = 2

_MOST_LAYERS = 8
"""Most layers of a short simulation. By then the window is full, or a layer moves little."""

_RESOLUTION_PARTS = 24
"""Resolution of costs in a program, as a part of a layer's bytes and of its forward."""
_RESOLUTION_PARTS_OF_SHORT = 14
"""The same for several short chunks, whose programs are large."""
_SHORT_CHUNK = 3
"""Most layers of a short chunk."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a treatment at one place of a chunk, for one microbatch."""

    added_s: float
    """Seconds that it adds to forward and backward, over keeping everything."""
    d2h_s: float
    """Seconds of its copies to the host."""
    extra_bytes: int
    """Peak device bytes beside the kept ones of microbatches in flight: copies in flight, reloaded tensors, temporaries."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreatmentCosts:
    """A treatment and its costs."""

    treatment: Treatment
    """The treatment."""
    inner: Cost
    """Cost among other layers with the same treatment."""
    last: Cost
    """Cost as the last layer of a chunk, with which backward begins."""

    @property
    def first_wait_s(self) -> float:
        """Seconds of the wait for its first reload, if no later layer has announced it."""
        return max(self.last.added_s - self.inner.added_s, 0.0) if self.treatment.moved_bytes else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The efficient treatments of a kind of layer, with their costs."""

    inner: tuple[TreatmentCosts, ...]
    """Treatments that may be best among other layers for some budget. The first keeps everything."""
    last: tuple[TreatmentCosts, ...]
    """Treatments that may be best for the last layer of a chunk."""
    resolution_s: float
    """Resolution in seconds of a microbatch: costs that differ by less count as equal."""
    resolution_bytes: int
    """Resolution in bytes of a microbatch."""


def measure_costs(rank: RankModel, layer: LayerModel, treatments: Sequence[Treatment]) -> LayerCosts:
    """Measure the treatments of a kind of layer by short simulations.

    Args:
        rank: Gives the link, the engine's rules, the length of its chunks, and whether host memory is limited.
        layer: The kind.
        treatments: Its treatments; the first keeps everything.
    """
    longest = max(len(chunk.layers) for chunk in rank.chunks)
    many = min(max(2, longest), _MOST_LAYERS)
    measured = [_measure(rank, layer, one, (many // 2, many)) for one in treatments]
    base_inner, base_last = measured[0]
    costs = [
        TreatmentCosts(treatment=one, inner=_subtract(inner, base_inner), last=_subtract(last, base_last))
        for one, (inner, last) in zip(treatments, measured, strict=True)
    ]
    is_short = 1 < longest <= _SHORT_CHUNK and len(rank.chunks) > 1
    parts = _RESOLUTION_PARTS_OF_SHORT if is_short else _RESOLUTION_PARTS
    resolution_s, resolution_bytes = max(layer.forward_s / parts, 1e-9), max(layer.saved_bytes // parts, 1)

    def pick(places: Sequence[Cost], others: Sequence[float]) -> tuple[TreatmentCosts, ...]:
        rows = [
            (
                round(cost.added_s / resolution_s),
                round(one.treatment.kept_bytes / resolution_bytes),
                round(cost.extra_bytes / resolution_bytes),
                0 if rank.host_budget_bytes is None else round(one.treatment.moved_bytes / resolution_bytes),
                other,
            )
            for one, cost, other in zip(costs, places, others, strict=True)
        ]
        return tuple(costs[place] for place in sorted({0, *find_efficient(rows)}))

    return LayerCosts(
        inner=pick([one.inner for one in costs], [round(one.first_wait_s / resolution_s / 4) for one in costs]),
        # A last layer with offload spares earlier layers the wait for the first reload.
        last=pick([one.last for one in costs], [not one.treatment.moved_bytes for one in costs]),
        resolution_s=resolution_s,
        resolution_bytes=resolution_bytes,
    )


def _measure(rank: RankModel, layer: LayerModel, treatment: Treatment, counts: tuple[int, int]) -> tuple[Cost, Cost]:
    """Return the simulated totals of a treatment among others and as the last layer of a chunk, not yet the differences."""
    few, many = counts
    results = {layers: _simulate(rank, layer, treatment, layers) for layers in {1, few, many}}
    kept_bytes = layer.saved_bytes + treatment.kept_bytes
    alone, shorter, longer = results[1], results[few], results[many]
    last = Cost(
        added_s=alone.step_s / _MICROBATCHES,
        d2h_s=alone.d2h_s / _MICROBATCHES,
        extra_bytes=alone.peak_bytes - _IN_FLIGHT * kept_bytes,
    )
    # Window and prefetch hide a burst of copies, not a load that lasts through a long chunk: its second half counts.
    inner = Cost(
        added_s=(longer.step_s - shorter.step_s) / _MICROBATCHES / (many - few),
        d2h_s=(longer.d2h_s - shorter.d2h_s) / _MICROBATCHES / (many - few),
        extra_bytes=longer.peak_bytes - many * _IN_FLIGHT * kept_bytes,
    )
    return inner, last


def _subtract(cost: Cost, base: Cost) -> Cost:
    return dataclasses.replace(cost, added_s=max(cost.added_s - base.added_s, 0.0))


def _simulate(rank: RankModel, layer: LayerModel, treatment: Treatment, layers: int) -> RankResult:
    actions: dict[Site, Action] = {
        Site(chunk=0, layer=number, tag=tag): action for number in range(layers) for tag, action in treatment.actions
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
