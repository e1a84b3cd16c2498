"""Applies a plan to one layer: which saved tensors stay on the GPU, are offloaded by which group, or are recomputed.

Segments are identified by their index in `LayerModel.segments`. A plan that a layer cannot follow is rejected by the rules of
`fgoffload.tags`, as in the engine and the executor.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from fgoffload.plan import Action
from fgoffload.planner.ranks.layer_model import HostWait, LayerModel, SavedTensor, UnitModel
from fgoffload.planner.simulation.choice_rules import check_choice
from fgoffload.tags import default_tags, list_read_tags

_LAST = "the last segment"

_ENDS_AFTER = {
    "layer_input": _LAST,
    "attn_norm": "attn_proj",
    "mlp_norm": _LAST,
    "mlp_fc1": "mlp_fc2",
    "mlp_act": "mlp_fc2",
    "moe_act": "expert_fc2",
}
"""Segment that ends the group of a tag, if it is not the tag's own. A norm's input is also the residual, and a checkpoint
saves its input at the end of its forward. Source: the calls of `group_commit` in megatron-core 0.16.1, and our own
sites in fgoffload/integrations/megatron/adapter/regions.py and layer_inputs.py."""

_ENDS_LAST = frozenset({"layer_input", "attn_norm", "mlp_norm", "mlp_fc1", "moe_act"})
"""Tags whose groups end last if several groups end after the same segment. Same source."""


class Take(NamedTuple):
    """A place in backward that needs a tensor."""

    before: int  # before the backward of this segment
    unit: str | None  # the unit whose recompute needs it; None for the segment's own backward
    group: int | None
    """Group of the site that needs it, which shows the engine where backward is; None if the site is not offloaded."""


class PlacedTensor(NamedTuple):
    """A tensor and its lifetime, from forward or a recompute to backward. It may be offloaded in between."""

    tensor: SavedTensor  # the tensor
    saved_after: int  # allocated by the forward of this segment
    freed_after: int  # freed after the backward of this segment
    takes: tuple[Take, ...] = ()  # places that need it, in backward order; empty for a recomputed tensor
    used_until: int = -1  # if offloaded: last segment whose forward reads it; it is not freed before
    leaves_with: int = -1  # the group that offloads it: the first submitted group that saves it
    returns_for: int = -1  # the group that it is reloaded for: the last group in forward that saves it


class LeavingGroup(NamedTuple):
    """Storages of one tag that are offloaded together, except storages that stay on the GPU or belong to an earlier group."""

    tag: str
    action: Action  # offload, with or without recompute
    tensors: tuple[SavedTensor, ...]  # offloaded tensors; backward reaches the group even if it has none
    starts_at: int  # first segment of its site, which sets the order of groups
    ends_after: int  # last segment of its site, after which it is submitted unless it is held
    held_over: int | None
    """Segment before which the host waits. The group is submitted after that wait. None if it is submitted as it ends."""
    opened_before_end: int  # number of groups of the layer that start before this one ends, itself included
    submitted_as: int  # index in the order in which the layer's groups are submitted
    asked_before: int  # segment before whose backward its site first needs a tensor

    @property
    def size_bytes(self) -> int:
        """Offloaded bytes."""
        return sum(tensor.size_bytes for tensor in self.tensors)


class Rerun(NamedTuple):
    """A unit that is recomputed in backward."""

    unit: str  # its name in `fgoffload.tags.RECOMPUTE_UNITS`
    before: int  # it runs before the backward of this segment
    segments: tuple[int, ...]  # recomputed segments, in order
    seconds: tuple[float, ...]  # compute seconds of each segment
    made: tuple[PlacedTensor, ...]  # recomputed tensors: `saved_after` is one of `segments`


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedLayer:
    """A layer under a plan. Equal layers share one instance, so its properties are computed once."""

    layer: LayerModel  # the layer
    kept: tuple[PlacedTensor, ...]  # tensors that stay on the device from forward to backward
    held: tuple[PlacedTensor, ...]  # recomputed tensors that forward references until the layer ends
    shared: tuple[SavedTensor, ...]
    """Storages that all layers share, such as rotary tables. They stay on the GPU and count once per microbatch and chunk."""
    leaving: tuple[PlacedTensor, ...]  # offloaded tensors
    groups: tuple[LeavingGroup, ...]  # groups of the offloaded tags, in the order in which forward reaches their sites
    reruns: tuple[Rerun, ...]  # recomputes, in backward order

    @property
    def kept_bytes(self) -> int:
        """Device bytes that a microbatch holds between forward and backward once copies are done, without `shared`."""
        return sum(kept.tensor.size_bytes for kept in self.kept)

    @functools.cached_property
    def saved_bytes(self) -> Mapping[int, int]:
        """Change of device bytes by the forward of each segment; negative if it frees more than it saves."""
        last = len(self.layer.segments) - 1
        sizes = [(one.saved_after, one.tensor.size_bytes) for one in (*self.kept, *self.leaving, *self.held)]
        sizes += [(last, -one.tensor.size_bytes) for one in self.held]
        sizes += [(last, -self.staged_bytes)]
        return _sum_by_place(sizes)

    @functools.cached_property
    def freed_bytes(self) -> Mapping[int, int]:
        """Device bytes of kept and recomputed tensors that the backward of each segment frees."""
        made = (one for rerun in self.reruns for one in rerun.made)
        return _sum_by_place((one.freed_after, one.tensor.size_bytes) for one in (*self.kept, *made))

    @functools.cached_property
    def released_bytes(self) -> Mapping[tuple[int, str | None], tuple[int, ...]]:
        """Sizes of resident tensors that sites without offload need, by segment and unit of a `Take`; 0 for repeated needs."""
        sizes: dict[tuple[int, str | None], tuple[int, ...]] = {}
        for kept in self.kept:
            asked = [(take.before, take.unit) for take in kept.takes if take.group is None]
            for number, asker in enumerate(asked):
                sizes[asker] = (*sizes.get(asker, ()), 0 if number else kept.tensor.size_bytes)
        return sizes

    @property
    def moved_bytes(self) -> int:
        """Bytes of a microbatch that are offloaded and reloaded."""
        return sum(group.size_bytes for group in self.groups)

    @property
    def staged_bytes(self) -> int:
        """Bytes of a microbatch that are offloaded through a staging slot."""
        return sum(one.tensor.size_bytes for one in self.leaving if self.layer.is_staged(one.tensor))

    @property
    def recompute_s(self) -> float:
        """Seconds that recompute adds to backward."""
        return sum(seconds for rerun in self.reruns for seconds in rerun.seconds)


def _sum_by_place(sizes: Iterable[tuple[int, int]]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for place, size_bytes in sizes:
        sums[place] = sums.get(place, 0) + size_bytes
    return sums


def resolve_layer(
    layer: LayerModel, actions: Mapping[str, Action], *, min_offloaded_numel: int, staying_tags: Set[str] = frozenset()
) -> ResolvedLayer:
    """Apply `actions` to `layer`, or reject actions that it cannot follow. Equal arguments return the same object.

    Tensors with `staying_tags` are referenced outside of the layer: offloading them would free nothing.
    """
    chosen = frozenset((name, action) for name, action in actions.items() if action is not Action.KEEP)
    return _resolve(layer, chosen, min_offloaded_numel, frozenset(staying_tags))


# Most layers of a model share kind and actions, and the solver resolves them many times.
@functools.lru_cache(maxsize=4096)
def _resolve(
    layer: LayerModel, chosen: frozenset[tuple[str, Action]], min_offloaded_numel: int, staying_tags: frozenset[str]
) -> ResolvedLayer:
    actions = dict(sorted(chosen, key=lambda pair: pair[0]))
    check_choice(layer, actions)
    places = _Places(layer)
    units = tuple(unit for unit in layer.units if actions.get(unit.name, Action.KEEP).recomputes)
    saved = _list_saved(layer, units, places)
    reruns = _list_reruns(layer, units, saved, places)
    saving = {tag for one in saved for tag in one.tensor.tags}
    offloaded = places.order(tag for tag, action in actions.items() if action.offloads and tag in saving)
    # Tags that a recompute covers need the recomputed tensors, not saved ones.
    covered = {tag for unit in units for tag in unit.covered}
    again = [(rerun, list_read_tags([rerun.unit])) for rerun in reruns]
    takes = {one.tensor.name: _list_takes(one, offloaded, covered, again, places) for one in saved}
    groups = _list_groups(actions, offloaded, takes, places)
    kept, leaving = [], []
    for one in saved:
        owners = [place for place, group in enumerate(groups) if group.tag in one.tensor.tags]
        if one.tensor.is_same_in_all_layers:
            continue
        one = one._replace(takes=takes[one.tensor.name])
        is_able = not one.tensor.stays and not one.tensor.is_below(min_offloaded_numel)
        if not owners or not is_able or staying_tags.intersection(one.tensor.tags):
            kept.append(one)
        else:
            used_until = max(places.find(tag) for tag in one.tensor.tags)
            first = min(owners, key=lambda place: groups[place].submitted_as)
            leaving.append(one._replace(used_until=used_until, leaves_with=first, returns_for=max(owners)))
    return ResolvedLayer(
        layer=layer,
        kept=tuple(kept),
        held=tuple(places.saved[name] for unit in units for name in unit.held),
        shared=tuple(one.tensor for one in saved if one.tensor.is_same_in_all_layers),
        leaving=tuple(leaving),
        groups=tuple(
            group._replace(tensors=tuple(one.tensor for one in leaving if one.leaves_with == place))
            for place, group in enumerate(groups)
        ),
        reruns=reruns,
    )


class _Places:
    def __init__(self, layer: LayerModel) -> None:
        self._places = {segment.name: place for place, segment in enumerate(layer.segments)}
        self.last = len(layer.segments) - 1
        self.hold = next((place for place, one in enumerate(layer.segments) if one.host_wait is HostWait.HOLD), None)
        """First segment with a host wait over which groups are held."""
        self.saved = {tensor.name: self.locate(tensor) for tensor in layer.tensors}  # saved storages without recompute, by name

    def find(self, name: str) -> int:
        """Return the index of the segment `name`; 0 if the layer has no such segment."""
        return self._places.get(name, 0)

    def locate(self, tensor: SavedTensor) -> PlacedTensor:
        """Return the lifetime of a tensor that is not recomputed."""
        # The tag that comes first in forward comes last in backward.
        first = min(self.find(tag) for tag in tensor.tags)
        return PlacedTensor(tensor=tensor, saved_after=first, freed_after=first)

    def find_end(self, tag: str) -> int:
        """Return the segment after whose forward the group of `tag` ends."""
        name = _ENDS_AFTER.get(tag, tag)
        return self.last if name is _LAST else max(self.find(tag), self.find(name))

    def order(self, tags: Iterable[str]) -> tuple[str, ...]:
        """Return `tags` in the order in which forward reaches their sites."""
        return tuple(sorted(tags, key=lambda tag: (self.find(tag), default_tags().get_place(tag))))

    def list_segments(self, unit: UnitModel) -> tuple[int, ...]:
        """Return the segments that `unit` recomputes."""
        return tuple(self._places[name] for name in unit.segments)


def _list_saved(layer: LayerModel, units: Sequence[UnitModel], places: _Places) -> tuple[PlacedTensor, ...]:
    """Return the tensors that forward saves if `units` are recomputed: the inputs they keep, not the tensors they drop."""
    dropped = {name for unit in units for name in unit.drops}
    saved = {name: one for name, one in places.saved.items() if name not in dropped}
    for unit in units:
        dropped_by_others = {name for other in units if other is not unit for name in other.drops}
        first = places.list_segments(unit)[0]
        for tensor in unit.keeps:
            if tensor.name not in dropped_by_others:
                # The unit's input is needed until backward has passed the unit.
                saved.setdefault(tensor.name, PlacedTensor(tensor, saved_after=first, freed_after=first))
    return tuple(saved.values())


def _list_reruns(
    layer: LayerModel, units: Sequence[UnitModel], saved: Sequence[PlacedTensor], places: _Places
) -> tuple[Rerun, ...]:
    """Return the recomputes in backward order. Recomputes before the same segment are in forward order."""
    tensors = {tensor.name: tensor for tensor in layer.tensors}
    before = _find_when(units, tensors, places)
    # A kept input is not recomputed. If two units drop a tensor, the one that runs first recomputes it.
    made, reruns = {one.tensor.name for one in saved}, []
    for unit in sorted(units, key=lambda unit: (-before[unit.name], places.list_segments(unit)[0])):
        segments = places.list_segments(unit)
        names = [name for name in unit.drops if name in tensors and name not in made]
        made.update(names)
        seconds = [unit.forward_part * layer.segments[place].forward_s for place in segments]
        seconds[-1] += unit.extra_s
        # The next segment saves the unit's output, which exists at the unit's end.
        found = [places.saved[name] for name in names]
        again = [one if one.saved_after in segments else one._replace(saved_after=segments[-1]) for one in found]
        if unit.extra_bytes:
            beside = SavedTensor(name=f"extra bytes of {unit.name}", tags=(unit.name,), size_bytes=unit.extra_bytes)
            again.append(PlacedTensor(beside, saved_after=segments[-1], freed_after=segments[-1]))
        reruns.append(Rerun(unit.name, before[unit.name], segments, tuple(seconds), tuple(again)))
    return tuple(reruns)


def _find_when(units: Sequence[UnitModel], tensors: Mapping[str, SavedTensor], places: _Places) -> dict[str, int]:
    """Return the segment before whose backward each unit is recomputed, by unit name."""
    before: dict[str, int] = {}
    readers: list[tuple[frozenset[int], int]] = []
    # In reverse forward order, since a unit must run before any recompute that reads its output.
    for unit in sorted(units, key=lambda unit: places.list_segments(unit)[0], reverse=True):
        made = {places.find(tag) for name in unit.drops if name in tensors for tag in tensors[name].tags}
        before[unit.name] = max([places.find(unit.before), *(place for segments, place in readers if segments & made)])
        readers.append((frozenset(places.list_segments(unit)), before[unit.name]))
    return before


def _list_takes(
    one: PlacedTensor, offloaded: Sequence[str], covered: Set[str], again: Sequence[tuple[Rerun, Set[str]]], places: _Places
) -> tuple[Take, ...]:
    """Return the places that need `one`: segments of its uncovered tags, and recomputes in `again` that read it."""
    found = [(places.find(tag), tag) for tag in one.tensor.tags if tag not in covered]
    askers = set()
    for rerun, read in again:
        askers |= {(rerun.before, rerun.unit, tag) for place, tag in found if place in rerun.segments or tag in read}
    # A module that is recomputed as a whole needs its input in the recompute, not in the backward of its outputs.
    asked = {tag for _, unit, tag in askers if tag == ("layer_input" if unit == "layer" else unit)}
    askers |= {(place, "", tag) for place, tag in found if tag not in asked}
    ordered = sorted(askers, key=lambda asker: (-asker[0], -places.find(asker[2]), asker))
    return tuple(
        Take(before=place, unit=unit or None, group=offloaded.index(tag) if tag in offloaded else None)
        for place, unit, tag in ordered
    )


def _list_groups(
    actions: Mapping[str, Action], offloaded: Sequence[str], takes: Mapping[str, Sequence[Take]], places: _Places
) -> tuple[LeavingGroup, ...]:
    groups = []
    ended = sorted(offloaded, key=lambda tag: (places.find_end(tag), tag in _ENDS_LAST, offloaded.index(tag)))
    for place, tag in enumerate(offloaded):
        ends_after = places.find_end(tag)
        is_before_hold = places.hold is not None and ends_after < places.hold
        groups.append(
            LeavingGroup(
                tag=tag,
                action=actions[tag],
                tensors=(),
                starts_at=places.find(tag),
                ends_after=ends_after,
                held_over=places.hold if is_before_hold else None,
                opened_before_end=sum(places.find(other) <= ends_after for other in offloaded),
                submitted_as=ended.index(tag),
                asked_before=max(take.before for asked in takes.values() for take in asked if take.group == place),
            )
        )
    return tuple(groups)
