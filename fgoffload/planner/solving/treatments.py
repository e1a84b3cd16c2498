"""Efficient treatments of a layer: none is beaten by another in memory, copies and recompute together.

A layer has independent parts: a treatment of attention changes neither bytes nor recompute of the experts. So each part has a
few dozen treatments, where the whole layer would have thousands. Parts are joined one by one, and beaten treatments are dropped
at once. A unit that covers many others, as `layer`, is decided first: each compatible set of such units leaves its own parts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fgoffload.errors import PlanError
from fgoffload.plan import Action
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.simulation.choice_rules import check_choice
from fgoffload.planner.simulation.layer_choice import resolve_layer
from fgoffload.tags import default_tags

Actions = tuple[tuple[str, Action], ...]
"""Actions of one layer by tag or unit, sorted by name, without `keep`."""

_WIDE_COVERS = 3
"""Number of covered units, beside itself, from which a unit is decided first."""

_RESOLUTION_PARTS = 32
"""Resolution of treatments, as a part of a layer's bytes and of its forward."""

_MOST = 200
"""Most treatments of one kind of layer. With more the resolution is halved: each takes milliseconds to simulate."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Treatment of one layer, with its change against keeping everything. Bytes and seconds are those of one microbatch."""

    actions: Actions  # the actions
    kept_bytes: int = 0  # change of the device bytes from forward to backward; negative with offload or recompute
    moved_bytes: int = 0  # bytes offloaded and reloaded
    groups: int = 0  # number of copies in each direction
    recompute_s: float = 0.0  # seconds of recompute in backward

    def join(self, other: "Treatment") -> "Treatment":
        """Return the sum of treatments of two parts of one layer."""
        return Treatment(
            actions=tuple(sorted((*self.actions, *other.actions), key=lambda row: row[0])),
            kept_bytes=self.kept_bytes + other.kept_bytes,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            groups=self.groups + other.groups,
            recompute_s=self.recompute_s + other.recompute_s,
        )

    def subtract(self, base: "Treatment") -> "Treatment":
        """Return the difference to `base`, whose actions are a subset."""
        return Treatment(
            actions=tuple(row for row in self.actions if row not in base.actions),
            kept_bytes=self.kept_bytes - base.kept_bytes,
            moved_bytes=self.moved_bytes - base.moved_bytes,
            groups=self.groups - base.groups,
            recompute_s=self.recompute_s - base.recompute_s,
        )


KEEP = Treatment(actions=())


def measure_treatment(layer: LayerModel, actions: Mapping[str, Action], *, min_offloaded_numel: int) -> Treatment:
    """Return the treatment with `actions`, measured on a layer."""
    resolved = resolve_layer(layer, actions, min_offloaded_numel=min_offloaded_numel)
    return Treatment(
        actions=tuple(sorted((name, action) for name, action in actions.items() if action is not Action.KEEP)),
        kept_bytes=resolved.kept_bytes - layer.saved_bytes,
        moved_bytes=resolved.moved_bytes,
        groups=sum(1 for group in resolved.groups if group.tensors),
        recompute_s=resolved.recompute_s,
    )


@functools.lru_cache(maxsize=128)
def list_treatments(layer: LayerModel, *, min_offloaded_numel: int, group_s: float = 0.0) -> tuple[Treatment, ...]:
    """Return the treatments of a kind of layer that may be best for some budget. The first keeps everything."""
    modes = list(_list_modes(layer, min_offloaded_numel))
    resolution_parts = _RESOLUTION_PARTS
    while True:
        prune = functools.partial(_drop_beaten, layer, parts=resolution_parts, group_s=group_s)
        found: list[Treatment] = []
        for base, parts in modes:
            treatments = [base]
            for part in parts:
                treatments = prune([one.join(other) for one in treatments for other in part])
            found += treatments
        found = prune(found)
        if len(found) <= _MOST or resolution_parts == 1:
            return (KEEP, *(one for one in found if one.actions))
        resolution_parts //= 2


@functools.lru_cache(maxsize=4096)
def list_neighbours(layer: LayerModel, actions: Actions, *, min_offloaded_numel: int) -> tuple[Treatment, ...]:
    """Return the treatments of a layer that differ from `actions` in one tag or unit."""
    found = []
    for name in list_names(layer):
        for action in _list_site_actions(layer, name):
            changed = {**dict(actions), name: action}
            if changed[name] is not dict(actions).get(name, Action.KEEP) and _is_allowed(layer, changed):
                found.append(measure_treatment(layer, changed, min_offloaded_numel=min_offloaded_numel))
    return tuple(found)


def find_efficient(costs: Sequence[Sequence[float]]) -> list[int]:
    """Return the places of the rows that no other row dominates: at most as large in all columns. Of equal rows the first."""
    import numpy as np

    table = np.array(costs, dtype=float)
    efficient: list[int] = []
    found = np.empty_like(table)
    # In this order every row that dominates another one comes first.
    for place in np.lexsort(table.T[::-1]):
        row, count = table[place], len(efficient)
        if not (found[:count] <= row).all(axis=1).any():
            found[count] = row
            efficient.append(int(place))
    return sorted(efficient)


def list_names(layer: LayerModel) -> list[str]:
    """Return the tags and units of a layer that a plan may name, tags first, in the order of the registry."""
    tags = {tag for tensor in layer.tensors for tag in tensor.tags if tag in layer.offloadable_tags or layer.find_unit(tag)}
    tags |= {unit.name for unit in layer.units if unit.name in default_tags()}
    ordered = sorted(tags, key=default_tags().get_place)
    return [*ordered, *(unit.name for unit in layer.units if unit.name not in tags)]


def list_needs(name: str) -> tuple[str, ...]:
    """Return the names that a plan with `name` must have too."""
    if name == "layer_input":
        return ("layer",)
    return default_tags().get(name).requires if name in default_tags() else ()


def _drop_beaten(layer: LayerModel, found: Sequence[Treatment], *, parts: int, group_s: float) -> list[Treatment]:
    """Return the treatments that no other one beats in recompute, memory and copies; of equal ones the shortest."""
    resolution_bytes, resolution_s = max(layer.saved_bytes // parts, 1), max(layer.forward_s / parts, 1e-9)
    costs: dict[tuple[int, ...], Treatment] = {}
    for one in sorted(found, key=lambda one: len(one.actions)):
        cost = (
            round((one.recompute_s + one.groups * group_s) / resolution_s),
            round(one.kept_bytes / resolution_bytes),
            round(one.moved_bytes / resolution_bytes),
        )
        costs.setdefault(cost, one)
    rows = list(costs)
    return [costs[rows[place]] for place in find_efficient(rows)]


def _list_modes(layer: LayerModel, numel: int) -> Iterator[tuple[Treatment, list[list[Treatment]]]]:
    """Yield each compatible set of wide units, with the treatments of the remaining parts."""
    sites = list_names(layer)
    wide = [name for name in sites if len(_list_covered(layer, name)) >= _WIDE_COVERS]
    for size in range(len(wide) + 1):
        for units in itertools.combinations(wide, size):
            base = dict.fromkeys(units, Action.RECOMPUTE)
            if _is_allowed(layer, base):
                covered = {name for unit in units for name in _list_covered(layer, unit)}
                free = [name for name in sites if name not in wide and name not in covered]
                parts = [_list_part(layer, base, part, numel) for part in _list_parts(layer, base, free)]
                yield measure_treatment(layer, base, min_offloaded_numel=numel), parts


def _list_part(layer: LayerModel, base: Mapping[str, Action], sites: Sequence[str], numel: int) -> list[Treatment]:
    """Return the treatments of a part's sites, as changes against `base` alone."""
    whole = measure_treatment(layer, base, min_offloaded_numel=numel)
    found = []
    for chosen in itertools.product(*(_list_site_actions(layer, name) for name in sites)):
        actions = {**base, **{name: one for name, one in zip(sites, chosen, strict=True) if one is not Action.KEEP}}
        if _is_allowed(layer, actions):
            found.append(measure_treatment(layer, actions, min_offloaded_numel=numel).subtract(whole))
    return found


def _list_site_actions(layer: LayerModel, name: str) -> tuple[Action, ...]:
    saves, recomputes = name in layer.offloadable_tags, layer.find_unit(name) is not None
    possible = {Action.KEEP: True, Action.RECOMPUTE: recomputes, Action.OFFLOAD: saves}
    possible[Action.RECOMPUTE_AND_OFFLOAD] = saves and recomputes
    return tuple(action for action, is_possible in possible.items() if is_possible)


def _list_parts(layer: LayerModel, base: Mapping[str, Action], sites: Sequence[str]) -> list[list[str]]:
    """Return `sites` in groups: two share one if both save the same tensor or a unit covers the other."""
    units = [unit for unit in layer.units if unit.name in base or unit.name in sites]
    dropped = {name for unit in units if unit.name in base for name in unit.drops}
    links = [{unit.name, *unit.covered} for unit in units]
    links += [{unit.name, *tensor.tags} for unit in units for tensor in unit.keeps]
    for tensor in layer.tensors:
        if tensor.name not in dropped:
            links.append({*tensor.tags, *(unit.name for unit in units if tensor.name in unit.drops)})
    parts: list[set[str]] = [{name} for name in sites]
    for link in links:
        touched = [part for part in parts if part & link]
        parts = [part for part in parts if not part & link] + ([set().union(*touched)] if touched else [])
    return _order(parts, sites)


def _order(parts: Iterable[set[str]], sites: Sequence[str]) -> list[list[str]]:
    # In the order of `sites`, so that two runs list the same.
    return sorted(([name for name in sites if name in part] for part in parts), key=lambda part: sites.index(part[0]))


def _is_allowed(layer: LayerModel, actions: Mapping[str, Action]) -> bool:
    try:
        check_choice(layer, actions)
    except PlanError:
        return False
    return True


def _list_covered(layer: LayerModel, name: str) -> tuple[str, ...]:
    unit = layer.find_unit(name)
    return () if unit is None else tuple(covered for covered in unit.covered if covered != name)
