"""Lists the treatments (sets of actions) of a layer that are Pareto-optimal in memory, copies and recompute.

We start by keeping everything, change one tag or unit at a time, and drop dominated treatments after each round. This reduces
thousands of treatments to a few dozen.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from fgoffload.errors import PlanError
from fgoffload.plan import Action
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import NOT_LATE, LateCosts
from fgoffload.planner.simulation.choice_rules import check_choice
from fgoffload.planner.simulation.layer_choice import resolve_layer
from fgoffload.tags import default_tags

Actions = tuple[tuple[str, Action], ...]
"""Pairs of a tag or unit of one layer and its action, sorted by name, without `keep`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Actions of one layer, and their cost relative to the baseline. Bytes and seconds are per microbatch."""

    actions: Actions  # actions other than `keep`
    kept_bytes: int = 0  # change in device bytes held from forward to backward; negative with offload or recompute
    moved_bytes: int = 0  # bytes offloaded and reloaded
    groups: int = 0  # number of copies in each direction
    tensors: int = 0  # number of tensors that the groups offload
    recompute_s: float = 0.0  # seconds of recompute in backward

    def subtract(self, base: "Treatment") -> "Treatment":
        """Return the difference from `base`, whose actions are a subset."""
        return Treatment(
            actions=tuple(row for row in self.actions if row not in base.actions),
            kept_bytes=self.kept_bytes - base.kept_bytes,
            moved_bytes=self.moved_bytes - base.moved_bytes,
            groups=self.groups - base.groups,
            tensors=self.tensors - base.tensors,
            recompute_s=self.recompute_s - base.recompute_s,
        )


KEEP = Treatment(actions=())


def measure_treatment(layer: LayerModel, actions: Mapping[str, Action], *, min_offloaded_numel: int) -> Treatment:
    """Compute the cost of `actions` on a layer."""
    resolved = resolve_layer(layer, actions, min_offloaded_numel=min_offloaded_numel)
    return Treatment(
        actions=tuple(sorted((name, action) for name, action in actions.items() if action is not Action.KEEP)),
        kept_bytes=resolved.kept_bytes - layer.saved_bytes,
        moved_bytes=resolved.moved_bytes,
        groups=sum(1 for group in resolved.groups if group.tensors),
        tensors=sum(len(group.tensors) for group in resolved.groups),
        recompute_s=resolved.recompute_s,
    )


@functools.lru_cache(maxsize=128)
def list_treatments(
    layer: LayerModel, *, min_offloaded_numel: int, late: LateCosts = NOT_LATE, parts: int = 20
) -> tuple[Treatment, ...]:
    """Return the treatments of a kind of layer that may be best for some budget. The first keeps everything.

    Costs are rounded to multiples of 1 / `parts` of the layer's bytes and forward time.
    """
    found, added = [KEEP], [KEEP]
    while added:
        grown = [
            other for one in added for other in list_neighbours(layer, one.actions, min_offloaded_numel=min_offloaded_numel)
        ]
        efficient = _drop_dominated(layer, [*found, *grown], late=late, parts=parts)
        known = {one.actions for one in found}
        found, added = efficient, [one for one in efficient if one.actions not in known]
    return (KEEP, *(one for one in found if one.actions))


@functools.lru_cache(maxsize=4096)
def list_neighbours(layer: LayerModel, actions: Actions, *, min_offloaded_numel: int) -> tuple[Treatment, ...]:
    """Return the treatments of a layer that differ from `actions` in one tag or unit."""
    found, before = [], dict(actions)
    for name in list_names(layer):
        for action in _list_site_actions(layer, name):
            changed = {**_list_needed(name, action), **before, name: action}
            if action is not before.get(name, Action.KEEP) and _is_allowed(layer, changed):
                found.append(measure_treatment(layer, changed, min_offloaded_numel=min_offloaded_numel))
    return tuple(found)


def _list_needed(name: str, action: Action) -> dict[str, Action]:
    needed = Action.RECOMPUTE if name == "layer_input" else Action.OFFLOAD
    return dict.fromkeys(list_needs(name), needed) if action.offloads else {}


def list_names(layer: LayerModel) -> list[str]:
    """Return the tags and units of a layer that a plan may name, tags first, in the order of the registry."""
    tags = {tag for tensor in layer.tensors for tag in tensor.tags if tag in layer.offloadable_tags or layer.find_unit(tag)}
    tags |= {unit.name for unit in layer.units if unit.name in default_tags()}
    ordered = sorted(tags, key=default_tags().get_place)
    return [*ordered, *(unit.name for unit in layer.units if unit.name not in tags)]


def list_needs(name: str) -> tuple[str, ...]:
    """Return the tags and units that a plan with `name` must also contain."""
    if name == "layer_input":
        return ("layer",)
    return default_tags().get(name).requires if name in default_tags() else ()


def _drop_dominated(layer: LayerModel, found: Sequence[Treatment], *, late: LateCosts, parts: int) -> list[Treatment]:
    """Drop treatments dominated in recompute, memory and copies. Among equals, keep the one with the fewest actions."""
    import numpy as np

    resolution_bytes, resolution_s = max(layer.saved_bytes // parts, 1), max(layer.forward_s / parts, 1e-9)
    costs: dict[tuple[int, ...], Treatment] = {}
    for one in sorted(found, key=lambda one: len(one.actions)):
        cost = (
            round((one.recompute_s + late.find(one.groups, one.tensors)) / resolution_s),
            round(one.kept_bytes / resolution_bytes),
            round(one.moved_bytes / resolution_bytes),
        )
        costs.setdefault(cost, one)
    # In sorted order, each row comes before all rows that it dominates.
    rows = np.array(sorted(costs))
    efficient, count = np.empty_like(rows), 0
    for row in rows:
        if not (efficient[:count] <= row).all(axis=1).any():
            efficient[count] = row
            count += 1
    best = set(map(tuple, efficient[:count].tolist()))
    return [one for cost, one in costs.items() if cost in best]


def _list_site_actions(layer: LayerModel, name: str) -> tuple[Action, ...]:
    saves, recomputes = name in layer.offloadable_tags, layer.find_unit(name) is not None
    possible = {Action.KEEP: True, Action.RECOMPUTE: recomputes, Action.OFFLOAD: saves}
    possible[Action.RECOMPUTE_AND_OFFLOAD] = saves and recomputes
    return tuple(action for action, is_possible in possible.items() if is_possible)


def _is_allowed(layer: LayerModel, actions: Mapping[str, Action]) -> bool:
    try:
        check_choice(layer, actions)
    except PlanError:
        return False
    return True
