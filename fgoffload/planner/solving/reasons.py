"""What a plan does about a site, in words, with the numbers that belong to it.

Bytes and the time of running again are those of one microbatch and layer. What was waited for is the simulator's, of a step of
the rank. What something costs and whether the budget needs it takes a second simulation: `prices` has that.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from fgoffload.plan import Action
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.simulation.layer_choice import resolve_layer
from fgoffload.planner.simulation.simulation_result import RankResult, TagTraffic
from fgoffload.planner.solving.choices import Actions, Choice, list_needs, measure_actions
from fgoffload.planner.solving.placement import LayerSlot, State
from fgoffload.tags import default_tags, find_recompute_unit
from fgoffload.units import format_bytes, format_ms


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
    """What leaves with it of one microbatch and layer."""
    freed_bytes: int
    """What is off the device between forward and backward, of one microbatch and layer, by this action alone."""
    recompute_s: float
    """Seconds that running again takes, of one microbatch and layer."""
    reason: str
    """What comes of it; of what is kept, why."""


def explain_rank(
    rank: RankModel, slots: Sequence[LayerSlot], state: State, result: RankResult, *, keeps_within_budget: bool
) -> tuple[Decision, ...]:
    """Return the decisions of a rank, chunk by chunk and kind by kind, in the order of a layer's forward.

    Args:
        rank: The rank.
        slots: Its layers.
        state: What they do.
        result: What the simulator says of it.
        keeps_within_budget: Whether the budget holds where everything is kept.
    """
    traffic = {(tag.kind, tag.tag, tag.action): tag for tag in result.tags}
    decisions: list[Decision] = []
    for chunk in range(len(rank.chunks)):
        for kind in dict.fromkeys(slot.layer.kind for slot in slots if slot.chunk == chunk):
            rows: dict[Actions, list[LayerSlot]] = {}
            for slot, configuration in zip(slots, state, strict=True):
                if slot.chunk == chunk and slot.layer.kind == kind:
                    rows.setdefault(configuration.actions, []).append(slot)
            decisions += _explain_kind(rank, rows, traffic, keeps_within_budget=keeps_within_budget)
    return tuple(decisions)


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
        groups: dict[object, tuple[Action, Choice, str | None, list[LayerSlot]]] = {}
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
    return [*tags, *(unit.name for unit in layer.units if unit.name not in tags)]


def _measure_alone(rank: RankModel, layer: LayerModel, actions: Mapping[str, Action], tag: str) -> Choice:
    """Return what the action of `tag` changes in a layer that does the rest of `actions` anyway, and what leaves with it."""
    others = {name: action for name, action in actions.items() if name != tag and tag not in list_needs(name)}
    own = {**others, **({tag: actions[tag]} if tag in actions else {})}
    with_it = measure_actions(layer, own, min_offloaded_numel=rank.min_offloaded_numel)
    without = measure_actions(layer, others, min_offloaded_numel=rank.min_offloaded_numel)
    # Not by difference: what runs again may spare another tag as many bytes as leave with this one.
    groups = resolve_layer(layer, own, min_offloaded_numel=rank.min_offloaded_numel).groups
    return Choice(
        actions=(),
        kept_bytes=with_it.kept_bytes - without.kept_bytes,
        moved_bytes=sum(group.size_bytes for group in groups if group.tag == tag),
        recompute_s=with_it.recompute_s - without.recompute_s,
    )


def _say_why_kept(rank: RankModel, layer: LayerModel, actions: Mapping[str, Action], tag: str) -> str | None:
    for name, action in actions.items():
        unit = find_recompute_unit(name)
        if action.recomputes and unit is not None and tag in unit.covers:
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


def _list_reasons(action: Action, alone: Choice, traffic: TagTraffic | None) -> Iterator[str]:
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
