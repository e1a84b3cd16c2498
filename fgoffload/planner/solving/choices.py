"""What a kind of layer may choose from: every way to treat its sites that has an effect of its own.

A layer falls apart into parts that have nothing to do with each other: what is done about attention changes neither the bytes
nor the recompute of the experts. So each part has a few dozen choices, where the layer as a whole would have thousands. A unit
that covers several parts, as `layer` and `moe` do, comes first: each set of such units that goes together is a mode, with parts
of its own.

    >>> from fgoffload.planner.ranks.layer_model import SavedTensor, Segment
    >>> residual = SavedTensor(name="residual", tags=("mlp_norm",), size_bytes=8)
    >>> norm = Segment(name="mlp_norm", forward_s=1.0, backward_s=2.0)
    >>> layer = LayerModel(kind="toy", segments=(norm,), tensors=(residual,))
    >>> [choice.actions for choice in list_modes(layer, min_offloaded_numel=1)[0].parts[0]]
    [(), (('mlp_norm', <Action.OFFLOAD: 'offload'>),)]
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fgoffload.errors import PlanError
from fgoffload.plan import Action
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.simulation.choice_rules import check_choice
from fgoffload.planner.simulation.layer_choice import ResolvedLayer, resolve_layer
from fgoffload.tags import default_tags, find_recompute_unit

Actions = tuple[tuple[str, Action], ...]
"""Of one layer, by tag or unit, sorted by name. What is kept is not named."""

_WIDE_COVERS = 3
"""A unit that covers this many others, itself apart, is a mode: a part that held them all would have too many choices."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to treat some sites of a layer, and what it changes against keeping them. Of one microbatch."""

    actions: Actions
    """What is done."""
    kept_bytes: int = 0
    """What more stays on the device from forward to backward: below 0 where something leaves or runs again."""
    moved_bytes: int = 0
    """What leaves, and comes back."""
    groups: int = 0
    """Copies each way."""
    recompute_s: float = 0.0
    """Seconds that backward takes longer."""
    returned_bytes: int = 0
    """The most that one unit has on the device again when it has run again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What a layer may choose from once it is settled which of the units that cover many others run again."""

    base: Choice
    """Those units, and nothing else."""
    parts: tuple[tuple[Choice, ...], ...]
    """By part, what it may choose from beyond that. The first choice of each is to keep all."""

    @property
    def configurations(self) -> int:
        """Return how many ways there are to choose for all parts."""
        return math.prod(len(part) for part in self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """What one layer does. What it comes to is asked for again and again, and counted once."""

    mode: Mode
    """Which units that cover several parts run again."""
    chosen: tuple[Choice, ...]
    """What each part of the mode does beyond that."""

    @functools.cached_property
    def actions(self) -> Actions:
        """Return the actions of the layer."""
        rows = (row for choice in (self.mode.base, *self.chosen) for row in choice.actions)
        return tuple(sorted(rows, key=lambda row: row[0]))

    @functools.cached_property
    def kept_bytes(self) -> int:
        """Return what more than in a layer that keeps all stays on the device: mostly below 0."""
        return self.mode.base.kept_bytes + sum(choice.kept_bytes for choice in self.chosen)

    @functools.cached_property
    def moved_bytes(self) -> int:
        """Return what leaves of a microbatch."""
        return self.mode.base.moved_bytes + sum(choice.moved_bytes for choice in self.chosen)

    @functools.cached_property
    def recompute_s(self) -> float:
        """Return the seconds that backward takes longer."""
        return self.mode.base.recompute_s + sum(choice.recompute_s for choice in self.chosen)

    @functools.cached_property
    def groups(self) -> int:
        """Return how many groups leave."""
        return self.mode.base.groups + sum(choice.groups for choice in self.chosen)

    @functools.cached_property
    def returned_bytes(self) -> int:
        """Return the most that is on the device again when a unit has run again."""
        return max((choice.returned_bytes for choice in (self.mode.base, *self.chosen)), default=0)

    @functools.cached_property
    def neighbours(self) -> "tuple[tuple[int, Configuration], ...]":
        """Return what a layer may do instead in one part, each with the part."""
        return tuple(
            (part, Configuration(mode=self.mode, chosen=(*self.chosen[:part], choice, *self.chosen[part + 1 :])))
            for part, choices in enumerate(self.mode.parts)
            for choice in choices
            if choice != self.chosen[part]
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what goes to another process: what was counted here is counted there again, and neighbours have neighbours."""
        return {"mode": self.mode, "chosen": self.chosen}


def list_modes(layer: LayerModel, *, min_offloaded_numel: int) -> tuple[Mode, ...]:
    """Return all that a layer may choose from: one choice for each effect, by the fewest actions that have it.

    Args:
        layer: A kind of layer.
        min_offloaded_numel: Elements. What is smaller stays, so that a site which saves nothing larger has nothing to choose.

    Returns:
        The first mode runs nothing of several parts again, so that its first choices together keep the whole layer.
    """
    sites = _list_sites(layer)
    wide = [name for name in sites if layer.find_unit(name) and len(_list_covered(name)) >= _WIDE_COVERS]
    modes = []
    for size in range(len(wide) + 1):
        for units in itertools.combinations(wide, size):
            base = {unit: Action.RECOMPUTE for unit in units}
            if _is_allowed(layer, base):
                modes.append(_make_mode(layer, base, [name for name in sites if name not in wide], min_offloaded_numel))
    return tuple(modes)


def find_configuration(
    layer: LayerModel, modes: Sequence[Mode], actions: Mapping[str, Action], *, min_offloaded_numel: int
) -> Configuration:
    """Return what somebody else chose for a layer: by parts of `modes` that do just that, or as one whole where none do.

    Raises:
        PlanError: The layer cannot do that.
    """
    rows = set(actions.items())
    resolved = resolve_layer(layer, actions, min_offloaded_numel=min_offloaded_numel)
    for mode in modes:
        if set(mode.base.actions) <= rows:
            fitting = [[choice for choice in part if set(choice.actions) <= rows] for part in mode.parts]
            chosen = tuple(max(part, key=lambda choice: len(choice.actions)) for part in fitting)
            found = Configuration(mode=mode, chosen=chosen)
            if resolve_layer(layer, dict(found.actions), min_offloaded_numel=min_offloaded_numel) == resolved:
                return found
    choice = measure_actions(layer, actions, min_offloaded_numel=min_offloaded_numel)
    return Configuration(mode=Mode(base=choice, parts=()), chosen=())


def list_configurations(modes: Sequence[Mode]) -> Iterator[Configuration]:
    """Yield every way to treat a whole layer."""
    for mode in modes:
        for chosen in itertools.product(*mode.parts):
            yield Configuration(mode=mode, chosen=chosen)


def count_configurations(modes: Sequence[Mode]) -> int:
    """Return how many ways there are to treat a whole layer."""
    return sum(mode.configurations for mode in modes)


def list_needs(name: str) -> tuple[str, ...]:
    """Return what has to be in a plan with `name`."""
    if name == "layer_input":
        return ("layer",)
    return default_tags().get(name).requires if name in default_tags() else ()


def measure_actions(layer: LayerModel, actions: Mapping[str, Action], *, min_offloaded_numel: int) -> Choice:
    """Return what `actions` come to in a layer, against keeping all.

    Raises:
        PlanError: The layer cannot do that.
    """
    resolved = resolve_layer(layer, actions, min_offloaded_numel=min_offloaded_numel)
    returned = (sum(one.tensor.size_bytes for one in rerun.made) for rerun in resolved.reruns)
    return Choice(
        actions=tuple(sorted((name, action) for name, action in actions.items() if action is not Action.KEEP)),
        kept_bytes=resolved.kept_bytes - layer.saved_bytes,
        moved_bytes=resolved.moved_bytes,
        groups=sum(1 for group in resolved.groups if group.tensors),
        recompute_s=resolved.recompute_s,
        returned_bytes=max(returned, default=0),
    )


def _make_mode(layer: LayerModel, base: Mapping[str, Action], sites: Sequence[str], min_offloaded_numel: int) -> Mode:
    """Return the mode in which the units of `base` run again, with parts of those of `sites` that these leave free."""
    covered = {name for unit in base for name in _list_covered(unit)}
    free = [name for name in sites if name not in covered]
    parts = [_list_part(layer, base, part, min_offloaded_numel) for part in _list_parts(layer, base, free)]
    whole = measure_actions(layer, base, min_offloaded_numel=min_offloaded_numel)
    return Mode(base=whole, parts=tuple(part for part in parts if len(part) > 1))


def _list_part(
    layer: LayerModel, base: Mapping[str, Action], sites: Sequence[str], min_offloaded_numel: int
) -> tuple[Choice, ...]:
    """Return what the sites of a part may choose from, each effect once, and what it changes against `base` alone."""
    found: dict[object, dict[str, Action]] = {}
    combinations = itertools.product(*(_list_site_actions(layer, name) for name in sites))
    # By rows, so that of two with one effect the shorter is found first.
    for chosen in sorted(combinations, key=lambda one: sum(action is not Action.KEEP for action in one)):
        actions: dict[str, Action] = {
            name: action for name, action in zip(sites, chosen, strict=True) if action is not Action.KEEP
        }
        if _is_allowed(layer, {**base, **actions}):
            resolved = resolve_layer(layer, {**base, **actions}, min_offloaded_numel=min_offloaded_numel)
            found.setdefault(_describe_effect(resolved), actions)
    whole = measure_actions(layer, base, min_offloaded_numel=min_offloaded_numel)
    choices = []
    for actions in found.values():
        choice = measure_actions(layer, {**base, **actions}, min_offloaded_numel=min_offloaded_numel)
        choices.append(_subtract(choice, whole, actions))
    return tuple(choices)


def _subtract(choice: Choice, whole: Choice, actions: Mapping[str, Action]) -> Choice:
    return Choice(
        actions=tuple(sorted(actions.items())),
        kept_bytes=choice.kept_bytes - whole.kept_bytes,
        moved_bytes=choice.moved_bytes - whole.moved_bytes,
        groups=choice.groups - whole.groups,
        recompute_s=choice.recompute_s - whole.recompute_s,
        # Units run again one after the other, so the most of them counts and not the sum.
        returned_bytes=choice.returned_bytes if choice.returned_bytes > whole.returned_bytes else 0,
    )


def _list_sites(layer: LayerModel) -> list[str]:
    """Return the tags and units of a layer, in the order of the registry, and then what is a unit alone."""
    tags = [name for name in default_tags().names if name in layer.offloadable_tags or layer.find_unit(name)]
    return [*tags, *(unit.name for unit in layer.units if unit.name not in tags)]


def _list_site_actions(layer: LayerModel, name: str) -> tuple[Action, ...]:
    saves = any(name in tensor.tags for tensor in layer.tensors)
    recomputes = layer.find_unit(name) is not None
    possible = {Action.KEEP: True, Action.RECOMPUTE: recomputes, Action.OFFLOAD: saves}
    possible[Action.RECOMPUTE_AND_OFFLOAD] = saves and recomputes
    return tuple(action for action, is_possible in possible.items() if is_possible)


def _list_parts(layer: LayerModel, base: Mapping[str, Action], sites: Sequence[str]) -> list[list[str]]:
    """Return `sites` in groups: two are in one where they look at one tensor, or a unit covers the other.

    Tags that need each other save one storage, so that they are in one anyway.
    """
    units = [unit for unit in layer.units if unit.name in base or unit.name in sites]
    dropped = {name for unit in units if unit.name in base for name in unit.drops}
    links = [{unit.name, *_list_covered(unit.name)} for unit in units]
    links += [{unit.name, *tensor.tags} for unit in units for tensor in unit.keeps]
    for tensor in layer.tensors:
        if tensor.name not in dropped:
            links.append({*tensor.tags, *(unit.name for unit in units if tensor.name in unit.drops)})
    parts: list[set[str]] = [{name} for name in sites]
    for link in links:
        touched = [part for part in parts if part & link]
        parts = [part for part in parts if not part & link] + ([set().union(*touched)] if touched else [])
    # In the order of `sites`, so that two runs list the same.
    return sorted(([name for name in sites if name in part] for part in parts), key=lambda part: sites.index(part[0]))


def _describe_effect(resolved: ResolvedLayer) -> object:
    """Return what is equal for two sets of actions that do the same: what runs again, what leaves with whom and comes back."""
    leaving = (
        (one.tensor.name, resolved.groups[one.leaves_with].tag, resolved.groups[one.returns_for].tag)
        for one in resolved.leaving
    )
    return tuple(rerun.unit for rerun in resolved.reruns), tuple(leaving)


def _is_allowed(layer: LayerModel, actions: Mapping[str, Action]) -> bool:
    try:
        check_choice(layer, actions)
    except PlanError:
        return False
    return True


def _list_covered(unit: str) -> tuple[str, ...]:
    found = find_recompute_unit(unit)
    return () if found is None else tuple(name for name in found.covers if name != unit)
