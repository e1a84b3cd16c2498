"""Applies a plan to one layer: keeps each saved tensor on the GPU, assigns it to an offloaded group, or recomputes it.

Segments are identified by their index in `LayerModel.segments`. Actions are checked against the rules of
`fgoffload.tags`, as in a training run.
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
"""Last segment of a tag's group, if that is not the tag's own segment. A norm's input is also the residual, which later
segments read, and a checkpoint saves its input at the end of its forward. Source: the calls to `group_commit` in megatron-core
0.16.1, and our own sites in fgoffload/integrations/megatron/adapter/regions.py and layer_inputs.py."""

_ENDS_LAST = frozenset({"layer_input", "attn_norm", "mlp_norm", "mlp_fc1", "moe_act"})
"""Tags whose groups are submitted last if several groups end after the same segment. Source: as for `_ENDS_AFTER`."""


class Take(NamedTuple):
    """A point in backward at which a tensor is needed."""

    before: int  # next segment to run backward after this point
    unit: str | None  # unit whose recompute needs the tensor; None if the segment's own backward needs it
    group: int | None
    """Group of the site that needs the tensor, which tracks the progress of backward; None if the site is not offloaded."""


class PlacedTensor(NamedTuple):
    """A tensor with its lifetime, which begins in forward or in a recompute and ends in backward."""

    tensor: SavedTensor
    saved_after: int  # segment whose forward allocates the tensor
    freed_after: int  # segment whose backward frees the tensor
    takes: tuple[Take, ...] = ()  # points at which backward needs it, in order; empty for a recomputed tensor
    used_until: int = -1  # last segment whose forward reads the tensor; its memory can be freed only after that
    offloaded_by: int = -1  # group that offloads the tensor: the first to be submitted of the groups with this tensor
    reloaded_for: int = -1  # group for which the tensor is reloaded: the last in forward order of the groups with this tensor


class OffloadedGroup(NamedTuple):
    """Storages of one tag that are offloaded together: those that neither stay on the GPU nor belong to an earlier group."""

    tag: str
    action: Action  # offload, with or without recompute
    tensors: tuple[SavedTensor, ...]  # offloaded tensors; backward reaches the group even if it has none
    starts_at: int  # first segment of its site, which determines the order of groups
    ends_after: int  # last segment of its site; the group is submitted after it unless the group is held
    held_until: int | None
    """Segment whose host wait delays the submission of the group; None if the group is submitted as soon as it ends."""
    opened_before_end: int  # number of the layer's groups that start before this group ends, including itself
    submit_place: int  # position in the submission order of the layer's groups
    needed_before: int  # next segment to run backward when the site first needs a tensor

    @property
    def size_bytes(self) -> int:
        """Offloaded bytes."""
        return sum(tensor.size_bytes for tensor in self.tensors)


class Recompute(NamedTuple):
    """A unit that is recomputed in backward."""

    unit: str  # name of the unit, as in a plan
    before: int  # next segment to run backward after the recompute
    segments: tuple[int, ...]  # recomputed segments, in order
    seconds: tuple[float, ...]  # recompute seconds of each segment
    tensors: tuple[PlacedTensor, ...]  # recomputed tensors; `saved_after` is one of `segments`


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedLayer:
    """A layer with a plan applied. Identical layers with the same actions share an instance and its cached properties."""

    layer: LayerModel
    kept: tuple[PlacedTensor, ...]  # tensors that stay on the GPU from forward to backward
    held: tuple[PlacedTensor, ...]  # recomputed tensors that forward references until the end of the layer
    shared: tuple[SavedTensor, ...]
    """Storages that all layers share, such as rotary tables. They stay on the GPU and count once per microbatch and chunk."""
    offloaded: tuple[PlacedTensor, ...]  # offloaded tensors
    groups: tuple[OffloadedGroup, ...]  # groups of the offloaded tags, in forward order of their sites
    recomputes: tuple[Recompute, ...]  # in backward order

    @property
    def kept_bytes(self) -> int:
        """Device bytes that a microbatch holds between forward and backward once its copies are done, excluding `shared`."""
        return sum(kept.tensor.size_bytes for kept in self.kept)

    @functools.cached_property
    def saved_bytes(self) -> Mapping[int, int]:
        """Change in device bytes during the forward of each segment; negative if it frees more than it saves."""
        last = len(self.layer.segments) - 1
        sizes = [(one.saved_after, one.tensor.size_bytes) for one in (*self.kept, *self.offloaded, *self.held)]
        sizes += [(last, -one.tensor.size_bytes) for one in self.held]
        sizes += [(last, -self.staged_bytes)]
        return _sum_by_place(sizes)

    @functools.cached_property
    def freed_bytes(self) -> Mapping[int, int]:
        """Device bytes of kept and recomputed tensors that the backward of each segment frees."""
        recomputed = (one for recompute in self.recomputes for one in recompute.tensors)
        return _sum_by_place((one.freed_after, one.tensor.size_bytes) for one in (*self.kept, *recomputed))

    @functools.cached_property
    def released_bytes(self) -> Mapping[tuple[int, str | None], tuple[int, ...]]:
        """Sizes of kept tensors that sites without offload need, by segment and unit (see `Take`); 0 for repeated uses."""
        sizes: dict[tuple[int, str | None], tuple[int, ...]] = {}
        for kept in self.kept:
            uses = [(take.before, take.unit) for take in kept.takes if take.group is None]
            for number, use in enumerate(uses):
                sizes[use] = (*sizes.get(use, ()), 0 if number else kept.tensor.size_bytes)
        return sizes

    @property
    def moved_bytes(self) -> int:
        """Bytes that a microbatch offloads and reloads."""
        return sum(group.size_bytes for group in self.groups)

    @property
    def staged_bytes(self) -> int:
        """Bytes that a microbatch offloads through a staging slot."""
        return sum(one.tensor.size_bytes for one in self.offloaded if self.layer.is_staged(one.tensor))

    @property
    def recompute_s(self) -> float:
        """Seconds that recompute adds to backward."""
        return sum(seconds for recompute in self.recomputes for seconds in recompute.seconds)


def _sum_by_place(sizes: Iterable[tuple[int, int]]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for place, size_bytes in sizes:
        sums[place] = sums.get(place, 0) + size_bytes
    return sums


def resolve_layer(
    layer: LayerModel, actions: Mapping[str, Action], *, min_offloaded_numel: int, staying_tags: Set[str] = frozenset()
) -> ResolvedLayer:
    """Apply `actions` to `layer`. Raise a PlanError if the layer does not support them. Equal arguments yield the same object.

    Tensors with any of `staying_tags` stay on the GPU, because code outside the layer still references them.
    """
    chosen = frozenset((name, action) for name, action in actions.items() if action is not Action.KEEP)
    return _resolve(layer, chosen, min_offloaded_numel, frozenset(staying_tags))


# Cached: most layers of a model have the same kind and actions, and the solver resolves them many times.
@functools.lru_cache(maxsize=4096)
def _resolve(
    layer: LayerModel, chosen: frozenset[tuple[str, Action]], min_offloaded_numel: int, staying_tags: frozenset[str]
) -> ResolvedLayer:
    actions = dict(sorted(chosen, key=lambda pair: pair[0]))
    check_choice(layer, actions)
    places = _Places(layer)
    units = tuple(unit for unit in layer.units if actions.get(unit.name, Action.KEEP).recomputes)
    saved = _list_saved(layer, units, places)
    recomputes = _list_recomputes(layer, units, saved, places)
    saving = {tag for one in saved for tag in one.tensor.tags}
    offloaded_tags = places.order(tag for tag, action in actions.items() if action.offloads and tag in saving)
    # If a recompute covers a tag, the tag's backward reads recomputed tensors instead of saved ones.
    covered = {tag for unit in units for tag in unit.covered}
    readers = [(recompute, list_read_tags([recompute.unit])) for recompute in recomputes]
    takes = {one.tensor.name: _list_takes(one, offloaded_tags, covered, readers, places) for one in saved}
    groups = _list_groups(actions, offloaded_tags, takes, places)
    kept, offloaded = [], []
    for one in saved:
        owners = [place for place, group in enumerate(groups) if group.tag in one.tensor.tags]
        if one.tensor.is_same_in_all_layers:
            continue
        one = one._replace(takes=takes[one.tensor.name])
        is_offloadable = not one.tensor.stays and not one.tensor.is_below(min_offloaded_numel)
        if not owners or not is_offloadable or staying_tags.intersection(one.tensor.tags):
            kept.append(one)
        else:
            used_until = max(places.find(tag) for tag in one.tensor.tags)
            first = min(owners, key=lambda place: groups[place].submit_place)
            offloaded.append(one._replace(used_until=used_until, offloaded_by=first, reloaded_for=max(owners)))
    return ResolvedLayer(
        layer=layer,
        kept=tuple(kept),
        held=tuple(places.saved[name] for unit in units for name in unit.held),
        shared=tuple(one.tensor for one in saved if one.tensor.is_same_in_all_layers),
        offloaded=tuple(offloaded),
        groups=tuple(
            group._replace(tensors=tuple(one.tensor for one in offloaded if one.offloaded_by == place))
            for place, group in enumerate(groups)
        ),
        recomputes=recomputes,
    )


class _Places:
    def __init__(self, layer: LayerModel) -> None:
        self._places = {segment.name: place for place, segment in enumerate(layer.segments)}
        self.last = len(layer.segments) - 1
        self.hold = next((place for place, one in enumerate(layer.segments) if one.host_wait is HostWait.HOLD), None)
        """First segment whose host wait delays the submission of earlier groups; None if no wait does."""
        self.saved = {tensor.name: self.locate(tensor) for tensor in layer.tensors}  # storages saved without recompute, by name

    def find(self, name: str) -> int:
        """Return the index of the segment `name`; 0 if the layer has no segment with this name."""
        return self._places.get(name, 0)

    def locate(self, tensor: SavedTensor) -> PlacedTensor:
        """Return the lifetime of a tensor that is not recomputed."""
        # Backward reaches the tensor's first tag last.
        first = min(self.find(tag) for tag in tensor.tags)
        return PlacedTensor(tensor=tensor, saved_after=first, freed_after=first)

    def find_end(self, tag: str) -> int:
        """Return the last segment of the group of `tag`."""
        name = _ENDS_AFTER.get(tag, tag)
        return self.last if name is _LAST else max(self.find(tag), self.find(name))

    def order(self, tags: Iterable[str]) -> tuple[str, ...]:
        """Return `tags` in forward order of their sites."""
        return tuple(sorted(tags, key=lambda tag: (self.find(tag), default_tags().get_place(tag))))

    def list_segments(self, unit: UnitModel) -> tuple[int, ...]:
        """Return the segments that `unit` recomputes."""
        return tuple(self._places[name] for name in unit.segments)


def _list_saved(layer: LayerModel, units: Sequence[UnitModel], places: _Places) -> tuple[PlacedTensor, ...]:
    """Return the tensors that forward saves if `units` are recomputed: those that no unit drops, and the units' inputs."""
    dropped = {name for unit in units for name in unit.drops}
    saved = {name: one for name, one in places.saved.items() if name not in dropped}
    for unit in units:
        dropped_by_others = {name for other in units if other is not unit for name in other.drops}
        first = places.list_segments(unit)[0]
        for tensor in unit.keeps:
            if tensor.name not in dropped_by_others:
                # The unit's input is needed until the end of the unit's backward.
                saved.setdefault(tensor.name, PlacedTensor(tensor, saved_after=first, freed_after=first))
    return tuple(saved.values())


def _list_recomputes(
    layer: LayerModel, units: Sequence[UnitModel], saved: Sequence[PlacedTensor], places: _Places
) -> tuple[Recompute, ...]:
    """Return the recomputes in backward order. Recomputes before the same segment are in forward order."""
    tensors = {tensor.name: tensor for tensor in layer.tensors}
    before = _find_when(units, tensors, places)
    # A kept input is not recomputed. If two units drop a tensor, the first to run recomputes it.
    done, recomputes = {one.tensor.name for one in saved}, []
    for unit in sorted(units, key=lambda unit: (-before[unit.name], places.list_segments(unit)[0])):
        segments = places.list_segments(unit)
        names = [name for name in unit.drops if name in tensors and name not in done]
        done.update(names)
        seconds = [unit.forward_part * layer.segments[place].forward_s for place in segments]
        seconds[-1] += unit.extra_s
        # In forward, the next segment saves the unit's output. The recompute produces it in the unit's last segment.
        found = [places.saved[name] for name in names]
        recomputed = [one if one.saved_after in segments else one._replace(saved_after=segments[-1]) for one in found]
        if unit.extra_bytes:
            extra = SavedTensor(name=f"extra bytes of {unit.name}", tags=(unit.name,), size_bytes=unit.extra_bytes)
            recomputed.append(PlacedTensor(extra, saved_after=segments[-1], freed_after=segments[-1]))
        recomputes.append(Recompute(unit.name, before[unit.name], segments, tuple(seconds), tuple(recomputed)))
    return tuple(recomputes)


def _find_when(units: Sequence[UnitModel], tensors: Mapping[str, SavedTensor], places: _Places) -> dict[str, int]:
    """Map each unit's name to the segment whose backward follows the unit's recompute."""
    before: dict[str, int] = {}
    readers: list[tuple[frozenset[int], int]] = []
    # In reverse forward order, because a unit must run before any recompute that reads its output.
    for unit in sorted(units, key=lambda unit: places.list_segments(unit)[0], reverse=True):
        written = {places.find(tag) for name in unit.drops if name in tensors for tag in tensors[name].tags}
        before[unit.name] = max([places.find(unit.before), *(place for segments, place in readers if segments & written)])
        readers.append((frozenset(places.list_segments(unit)), before[unit.name]))
    return before


def _list_takes(
    one: PlacedTensor, tags: Sequence[str], covered: Set[str], readers: Sequence[tuple[Recompute, Set[str]]], places: _Places
) -> tuple[Take, ...]:
    """Return where backward needs `one`: in segments of its tags that no recompute covers, and in recomputes that read it."""
    found = [(places.find(tag), tag) for tag in one.tensor.tags if tag not in covered]
    uses = set()
    for recompute, read in readers:
        uses |= {(recompute.before, recompute.unit, tag) for place, tag in found if place in recompute.segments or tag in read}
    # A fully recomputed module needs its input in the recompute, not in its own backward.
    inputs = {tag for _, unit, tag in uses if tag == ("layer_input" if unit == "layer" else unit)}
    uses |= {(place, "", tag) for place, tag in found if tag not in inputs}
    ordered = sorted(uses, key=lambda use: (-use[0], -places.find(use[2]), use))
    return tuple(
        Take(before=place, unit=unit or None, group=tags.index(tag) if tag in tags else None) for place, unit, tag in ordered
    )


def _list_groups(
    actions: Mapping[str, Action], tags: Sequence[str], takes: Mapping[str, Sequence[Take]], places: _Places
) -> tuple[OffloadedGroup, ...]:
    groups = []
    submitted = sorted(tags, key=lambda tag: (places.find_end(tag), tag in _ENDS_LAST, tags.index(tag)))
    for place, tag in enumerate(tags):
        ends_after = places.find_end(tag)
        is_before_hold = places.hold is not None and ends_after < places.hold
        groups.append(
            OffloadedGroup(
                tag=tag,
                action=actions[tag],
                tensors=(),
                starts_at=places.find(tag),
                ends_after=ends_after,
                held_until=places.hold if is_before_hold else None,
                opened_before_end=sum(places.find(other) <= ends_after for other in tags),
                submit_place=submitted.index(tag),
                needed_before=max(take.before for uses in takes.values() for take in uses if take.group == place),
            )
        )
    return tuple(groups)
