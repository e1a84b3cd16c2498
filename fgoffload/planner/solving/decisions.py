"""What a plan does about each tag, why, and what that costs: the rows of the tables of `fgoffload plan`.

Bytes and the time of a recompute are those of one microbatch and layer. What was waited for is the simulator's, of a step of
the rank. What something costs takes a second simulation, of the plan without it: a recompute may hide behind a wait, copies
that nobody waits for slow compute, and what one rank does others may wait for.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fgoffload.errors import PlanError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.layer_choice import resolve_layer
from fgoffload.planner.simulation.simulation_result import RankResult, StepResult, TagTraffic
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.states import LayerSlot, list_slots, read_plan
from fgoffload.planner.solving.treatments import Actions, Treatment, list_needs, measure_treatment
from fgoffload.tags import default_tags
from fgoffload.units import format_bytes, format_ms

_SHOWN_S = 5e-5
"""Half of what a table shows: a step that is longer by less is as long there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done about one tag or unit in layers of one kind."""

    rank: int
    """Of the pipeline."""
    chunk: int
    """Model chunk on the rank."""
    kind: str
    """Of layer."""
    tag: str
    """Tag or unit."""
    action: Action
    """What is done."""
    layers: tuple[int, ...]
    """In which layers, by number in the whole model."""
    moved_bytes: int
    """What is offloaded with it, of one microbatch and layer."""
    freed_bytes: int
    """What is off the device between forward and backward, of one microbatch and layer, by this action alone."""
    recompute_s: float
    """Seconds of the recompute, of one microbatch and layer."""
    reason: str
    """What comes of it; of what is kept, why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A step under a plan beside one under the plan without something that it does."""

    cost_s: float
    """How much longer the step is with it; below 0 where it is shorter."""
    rank: int
    """The pipeline rank with the highest peak without it."""
    peak_bytes: int
    """That peak."""
    lacking_bytes: int
    """What that peak is above the budget; 0 where it is not."""
    taken_along: tuple[str, ...] = ()
    """Tags that need what was left out, and were left out with it."""

    def describe(self) -> str:
        """Return why the plan does it, as far as the two steps say."""
        along = f" (and {', '.join(self.taken_along)}, which needs it)" if self.taken_along else ""
        # A recompute hides copies, and what is offloaded moves others to a better time.
        longer = ", and what else the plan does takes longer" if self.cost_s <= -_SHOWN_S else ""
        if self.lacking_bytes:
            return f"without it{along} rank {self.rank} lacks {format_bytes(self.lacking_bytes)}{longer}"
        return f"the budget holds without it{along} too{longer}"


def price_decisions(
    ranks: Sequence[RankModel],
    plan: OffloadPlan,
    result: StepResult,
    decisions: Iterable[Decision],
    *,
    budget_bytes: int,
) -> Price | None:
    """Return what `decisions` come to together, or None where the rest of the plan cannot be done without them.

    Args:
        ranks: That the plan is for, with their host budgets.
        plan: All of it.
        result: What it comes to.
        decisions: What to leave out. None of them keeps.
        budget_bytes: Of each device.
    """
    left_out = {Site(chunk=one.chunk, layer=layer, tag=one.tag) for one in decisions for layer in one.layers}
    along = {site for site in plan.actions if _needs_one(site, left_out)}
    rest = {site: action for site, action in plan.actions.items() if site not in left_out | along}
    try:
        without = simulate(ranks, dataclasses.replace(plan, actions=rest))
    except PlanError:
        return None
    worst = without.worst_rank
    return Price(
        cost_s=result.step_s - without.step_s,
        rank=worst.rank,
        peak_bytes=worst.peak_bytes,
        lacking_bytes=max(0, worst.peak_bytes - budget_bytes),
        taken_along=tuple(sorted({site.tag for site in along})),
    )


def explain_plan(
    ranks: Sequence[RankModel], plan: OffloadPlan, result: StepResult, *, budget_bytes: int
) -> tuple[Decision, ...]:
    """Return the decisions of all ranks, chunk by chunk and kind by kind, in the order of a layer's forward."""
    kept = simulate(ranks, OffloadPlan(actions={}))
    decisions: list[Decision] = []
    for place, rank in enumerate(ranks):
        keeps_within_budget = kept.ranks[place].peak_bytes <= budget_bytes
        decisions += _explain_rank(rank, plan, result.ranks[place], keeps_within_budget=keeps_within_budget)
    return tuple(decisions)


def _explain_rank(rank: RankModel, plan: OffloadPlan, result: RankResult, *, keeps_within_budget: bool) -> Iterator[Decision]:
    traffic = {(tag.kind, tag.tag, tag.action): tag for tag in result.tags}
    alike: dict[tuple[int, str], dict[Actions, list[LayerSlot]]] = {}
    for slot, treatment in zip(list_slots(rank), read_plan(plan, rank), strict=True):
        alike.setdefault((slot.chunk, slot.layer.kind), {}).setdefault(treatment.actions, []).append(slot)
    for rows in alike.values():
        yield from _explain_kind(rank, rows, traffic, keeps_within_budget=keeps_within_budget)


def _explain_kind(
    rank: RankModel,
    rows: Mapping[Actions, Sequence[LayerSlot]],
    traffic: Mapping[tuple[str, str, Action], TagTraffic],
    *,
    keeps_within_budget: bool,
) -> Iterator[Decision]:
    layer = next(iter(rows.values()))[0].layer
    for tag in _list_names(layer):
        # Layers that do the same about a tag may differ in what else they do, and with it in bytes and reasons.
        groups: dict[object, tuple[Action, Treatment, str | None, list[LayerSlot]]] = {}
        for chosen, alike in rows.items():
            actions = dict(chosen)
            action, alone = actions.get(tag, Action.KEEP), _measure_alone(rank, layer, actions, tag)
            has_to_say = action is Action.KEEP and not keeps_within_budget
            why = _say_why_kept(rank, layer, actions, tag) if has_to_say else None
            # Differences of the same times differ in their last digits.
            key = (action, alone.kept_bytes, alone.moved_bytes, round(alone.recompute_s, 9), why)
            groups.setdefault(key, (action, alone, why, []))[-1].extend(alike)
        acting = [slot.number for chosen, alike in rows.items() if tag in dict(chosen) for slot in alike]
        for action, alone, why, slots in groups.values():
            slots.sort(key=lambda slot: slot.number)
            if action is Action.KEEP:
                kept_here = _say_why_kept_here([slot.number for slot in slots], acting)
                reason = "everything fits" if keeps_within_budget else why or kept_here
            else:
                reason = "; ".join(_list_reasons(action, alone, traffic.get((layer.kind, tag, action))))
            yield Decision(
                rank=rank.rank,
                chunk=slots[0].chunk,
                kind=layer.kind,
                tag=tag,
                action=action,
                layers=tuple(slot.number for slot in slots),
                moved_bytes=alone.moved_bytes,
                freed_bytes=-alone.kept_bytes,
                recompute_s=alone.recompute_s,
                reason=f"{_STEMS[action]}: {reason}",
            )


_STEMS = {
    Action.KEEP: "kept",
    Action.RECOMPUTE: "runs again",
    Action.OFFLOAD: "leaves",
    Action.RECOMPUTE_AND_OFFLOAD: "runs again, and what it needs leaves",
}
"""How reasons begin."""


def _list_names(layer: LayerModel) -> list[str]:
    """Return the tags and units of a layer, in the order of the registry, units that are no tags last."""
    saving = {tag for tensor in layer.tensors for tag in tensor.tags}
    tags = [name for name in default_tags().names if name in saving or layer.find_unit(name)]
    tags += sorted(saving - {*tags})
    return [*tags, *(unit.name for unit in layer.units if unit.name not in tags)]


def _measure_alone(rank: RankModel, layer: LayerModel, actions: Mapping[str, Action], tag: str) -> Treatment:
    """Return what the action of `tag` changes in a layer that does the rest of `actions` anyway, and what leaves with it."""
    others = {name: action for name, action in actions.items() if name != tag and tag not in list_needs(name)}
    own = {**others, **({tag: actions[tag]} if tag in actions else {})}
    with_it = measure_treatment(layer, own, min_offloaded_numel=rank.min_offloaded_numel)
    without = measure_treatment(layer, others, min_offloaded_numel=rank.min_offloaded_numel)
    # Not by difference: what runs again may spare another tag as many bytes as leave with this one.
    groups = resolve_layer(layer, own, min_offloaded_numel=rank.min_offloaded_numel).groups
    moved_bytes = sum(group.size_bytes for group in groups if group.tag == tag)
    return dataclasses.replace(with_it.subtract(without), moved_bytes=moved_bytes)


def _say_why_kept(rank: RankModel, layer: LayerModel, actions: Mapping[str, Action], tag: str) -> str | None:
    for name, action in actions.items():
        unit = layer.find_unit(name)
        if action.recomputes and unit is not None and tag in unit.covered:
            return f"{name} runs again, so that it saves nothing"
    tensors = [tensor for tensor in layer.tensors if tag in tensor.tags]
    if layer.find_unit(tag) is None and tag not in layer.offloadable_tags:
        return "CUDA graphs keep it where it is"
    if layer.find_unit(tag) is None and all(tensor.is_below(rank.min_offloaded_numel) for tensor in tensors):
        most_bytes = max(tensor.size_bytes for tensor in tensors)
        return f"{format_bytes(most_bytes)}, below the least that moves, {rank.min_offloaded_numel} elements"
    return None


def _say_why_kept_here(layers: Sequence[int], acting: Sequence[int]) -> str:
    if acting and min(layers) > max(acting):
        return "the last layers of the chunk, which backward wants first; the budget holds without them"
    return "the budget holds without it"


def _list_reasons(action: Action, alone: Treatment, traffic: TagTraffic | None) -> Iterator[str]:
    if action.recomputes:
        yield f"{format_ms(alone.recompute_s)} of compute, {format_bytes(max(0, -alone.kept_bytes))} off the device"
    if not action.offloads:
        return
    if not alone.moved_bytes:
        yield "with another tag that saves the same storage"
    elif traffic is None or not traffic.d2h_bytes:
        yield "nothing of it, since something else holds it or the host budget is used up"
    else:
        yield f"{format_bytes(alone.moved_bytes)}, and compute waits for {_say_part(traffic)} of the time of its copies"


def _say_part(traffic: TagTraffic) -> str:
    if not traffic.exposed_s:
        return "none"
    part = traffic.exposed_s / (traffic.d2h_s + traffic.h2d_s)
    return f"{part:.0%}" if part >= 0.01 else "less than 1%"


def _needs_one(site: Site, left_out: Collection[Site]) -> bool:
    others = (dataclasses.replace(site, tag=name) for name in list_needs(site.tag))
    return site not in left_out and any(other in left_out for other in others)
