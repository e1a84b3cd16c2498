"""Explains a plan: one decision per tag, with its reason and cost, as shown in the tables of `fgoffload plan`.

Bytes and recompute times are per microbatch and layer. We find the cost of a decision by simulating the step without it. Its
recompute and copies alone do not show that cost: waits can hide recompute, and copies slow compute even if nothing waits.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fgoffload.errors import PlanError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.ranks.schedule import count_in_flight
from fgoffload.planner.simulation.layer_choice import resolve_layer
from fgoffload.planner.simulation.simulation_result import RankResult, StepResult
from fgoffload.planner.simulation.simulator import simulate_rank
from fgoffload.planner.solving.states import LayerSlot, list_slots, read_plan
from fgoffload.planner.solving.treatments import Actions, Treatment, list_needs, measure_treatment
from fgoffload.tags import default_tags
from fgoffload.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The action for one tag or unit, in layers of one kind."""

    rank: int  # pipeline rank
    chunk: int  # model chunk on the rank
    kind: str
    tag: str  # tag or unit
    action: Action
    layers: tuple[int, ...]  # numbers of the layers in the whole model
    moved_bytes: int  # offloaded bytes, per microbatch and layer
    freed_bytes: int  # device bytes that this action alone frees between forward and backward, per microbatch and layer
    recompute_s: float  # seconds of recompute, per microbatch and layer
    reason: str  # why the tag stays on the GPU; empty for other actions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Effect of a group of decisions, found by comparing the step with and without them."""

    cost_s: float  # seconds that the decisions add to the step; negative if they save time
    rank: int  # pipeline rank expected to have the highest peak without the decisions
    lacking_bytes: int  # bytes by which that rank exceeds the budget without the decisions; 0 if it fits
    dependent_tags: tuple[str, ...] = ()  # tags also left out of that step, because they depend on the decisions

    def describe(self) -> str:
        """Explain why the plan needs the decisions, or say that it would fit without them."""
        also = f" (and the tags that need it: {', '.join(self.dependent_tags)})" if self.dependent_tags else ""
        if self.lacking_bytes:
            return f"without it{also}, rank {self.rank} is {format_bytes(self.lacking_bytes)} over budget"
        return f"the plan also fits without it{also}, but no faster plan was found"


def price_decisions(
    ranks: Sequence[RankModel],
    plan: OffloadPlan,
    result: StepResult,
    groups: Iterable[Sequence[Decision]],
    *,
    budget_bytes: int,
) -> Iterator[Price | None]:
    """Yield the effect of each group of decisions, or None if the rest of the plan is invalid without the group.

    Only the rank that needs the group most is simulated, without its neighbors. In the pipeline, waits could hide the cost.
    """
    planned: dict[int, RankResult] = {}
    for decisions in groups:
        more_bytes = dict.fromkeys((one.rank for one in decisions), 0)
        for one in decisions:
            in_flight = count_in_flight(ranks[one.rank].passes, chunk=one.chunk)
            more_bytes[one.rank] += one.freed_bytes * len(one.layers) * in_flight
        _, number = max((result.ranks[rank].peak_bytes + size_bytes, rank) for rank, size_bytes in more_bytes.items())
        left_out = {Site(chunk=one.chunk, layer=layer, tag=one.tag) for one in decisions for layer in one.layers}
        dependent = {site for site in plan.actions if _depends_on_any(site, left_out)}
        rest = {site: action for site, action in plan.actions.items() if site not in left_out | dependent}
        try:
            without = simulate_rank(ranks[number], dataclasses.replace(plan, actions=rest))
        except PlanError:
            yield None
            continue
        if number not in planned:
            planned[number] = simulate_rank(ranks[number], plan)
        peak_bytes = result.ranks[number].peak_bytes + without.peak_bytes - planned[number].peak_bytes
        yield Price(
            cost_s=planned[number].step_s - without.step_s,
            rank=number,
            lacking_bytes=max(0, peak_bytes - budget_bytes),
            dependent_tags=tuple(sorted({site.tag for site in dependent})),
        )


def explain_plan(ranks: Sequence[RankModel], plan: OffloadPlan, kept: StepResult, *, budget_bytes: int) -> tuple[Decision, ...]:
    """Return the decisions for all ranks, by chunk and kind of layer, in forward order."""
    decisions: list[Decision] = []
    for rank, before in zip(ranks, kept.ranks, strict=True):
        decisions += _explain_rank(rank, plan, keeps_within_budget=before.peak_bytes <= budget_bytes)
    return tuple(decisions)


def _explain_rank(rank: RankModel, plan: OffloadPlan, *, keeps_within_budget: bool) -> Iterator[Decision]:
    alike: dict[tuple[int, str], dict[Actions, list[LayerSlot]]] = {}
    for slot, treatment in zip(list_slots(rank), read_plan(plan, rank), strict=True):
        alike.setdefault((slot.chunk, slot.layer.kind), {}).setdefault(treatment.actions, []).append(slot)
    for rows in alike.values():
        yield from _explain_kind(rank, rows, keeps_within_budget=keeps_within_budget)


def _explain_kind(
    rank: RankModel, rows: Mapping[Actions, Sequence[LayerSlot]], *, keeps_within_budget: bool
) -> Iterator[Decision]:
    layer = next(iter(rows.values()))[0].layer
    for tag in _list_names(layer):
        # Layers with the same action for a tag may differ in other actions, and therefore in bytes and reasons.
        groups: dict[object, tuple[Action, Treatment, str, list[LayerSlot]]] = {}
        for chosen, alike in rows.items():
            actions = dict(chosen)
            action, alone = actions.get(tag, Action.KEEP), _measure_alone(rank, layer, actions, tag)
            reason = ""
            if action is Action.KEEP:
                reason = "everything fits" if keeps_within_budget else _explain_kept(rank, layer, actions, tag)
                reason = reason or "the plan fits without it"
            # Rounded, because times that should be equal may differ in their last digits.
            key = (action, alone.kept_bytes, alone.moved_bytes, round(alone.recompute_s, 9), reason)
            groups.setdefault(key, (action, alone, reason, []))[-1].extend(alike)
        for action, alone, reason, slots in groups.values():
            yield Decision(
                rank=rank.rank,
                chunk=slots[0].chunk,
                kind=layer.kind,
                tag=tag,
                action=action,
                layers=tuple(sorted(slot.number for slot in slots)),
                moved_bytes=alone.moved_bytes,
                freed_bytes=-alone.kept_bytes,
                recompute_s=alone.recompute_s,
                reason=reason,
            )


def _list_names(layer: LayerModel) -> list[str]:
    saving = {tag for tensor in layer.tensors for tag in tensor.tags}
    tags = [name for name in default_tags().names if name in saving or layer.find_unit(name)]
    tags += sorted(saving - {*tags})
    return [*tags, *(unit.name for unit in layer.units if unit.name not in tags)]


def _measure_alone(rank: RankModel, layer: LayerModel, actions: Mapping[str, Action], tag: str) -> Treatment:
    """Return the marginal cost of the action for `tag` in a layer. `moved_bytes` counts only the group of `tag`."""
    others = {name: action for name, action in actions.items() if name != tag and tag not in list_needs(name)}
    own = {**others, **({tag: actions[tag]} if tag in actions else {})}
    with_it = measure_treatment(layer, own, min_offloaded_numel=rank.min_offloaded_numel)
    without = measure_treatment(layer, others, min_offloaded_numel=rank.min_offloaded_numel)
    # Not the difference between the treatments, because other groups may offload fewer bytes if the action also recomputes.
    groups = resolve_layer(layer, own, min_offloaded_numel=rank.min_offloaded_numel).groups
    moved_bytes = sum(group.size_bytes for group in groups if group.tag == tag)
    return dataclasses.replace(with_it.subtract(without), moved_bytes=moved_bytes)


def _explain_kept(rank: RankModel, layer: LayerModel, actions: Mapping[str, Action], tag: str) -> str:
    for name, action in actions.items():
        unit = layer.find_unit(name)
        if action.recomputes and unit is not None and tag in unit.covered:
            return f"{name} is recomputed, so it saves nothing"
    tensors = [tensor for tensor in layer.tensors if tag in tensor.tags]
    if layer.find_unit(tag) is None and tag not in layer.offloadable_tags:
        return "CUDA graphs keep it on the GPU" if tag in default_tags() else "no tag covers it"
    if layer.find_unit(tag) is None and all(tensor.is_below(rank.min_offloaded_numel) for tensor in tensors):
        most_bytes = max(tensor.size_bytes for tensor in tensors)
        return f"{format_bytes(most_bytes)}, below --min-offloaded-tensor-size {rank.min_offloaded_numel}"
    return ""


def _depends_on_any(site: Site, left_out: Collection[Site]) -> bool:
    others = (dataclasses.replace(site, tag=name) for name in list_needs(site.tag))
    return site not in left_out and any(other in left_out for other in others)
