"""One layer under a plan: which saved tensors are kept, offloaded by which group, or recomputed.

Segments are named by their place in `LayerModel.segments`, from 0. A plan that a layer cannot follow is refused here, by the
rules of `fgoffload.tags`, as the engine and the executor refuse it.
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
"""By tag: the segment after which its group ends, where that is not its own. A norm's input is the residual too, and a
checkpoint saves its input when its forward is through. Source: the calls of `group_commit` in megatron-core 0.16.1, and our own
sites in fgoffload/integrations/megatron/adapter/regions.py and layer_inputs.py."""

_ENDS_LAST = frozenset({"layer_input", "attn_norm", "mlp_norm", "mlp_fc1", "moe_act"})
"""Tags whose groups end behind the others that end after the same segment. Source: as above."""


class Take(NamedTuple):
    """Backward asks for a tensor."""

    before: int  # the segment before whose backward it does
    unit: str | None  # the unit that asks, which runs again there. None where it is the backward of that segment.
    group: int | None
    """The group of the site that asks, which tells the engine that backward has come there. None where that site stays."""


class PlacedTensor(NamedTuple):
    """A tensor from a forward, the first or one that runs again, until its backward. Some leave in between."""

    tensor: SavedTensor  # what it is
    saved_after: int  # the segment after whose forward it is there
    freed_after: int  # the segment after whose backward it is gone
    takes: tuple[Take, ...] = ()  # who asks for what was saved, in the order of backward. Empty for what runs again made.
    used_until: int = -1  # of one that leaves: the segment up to whose forward it is read, before which it is not freed
    leaves_with: int = -1  # the group that it leaves with: of those that save it, the first to be submitted
    returns_for: int = -1
    """The group that it comes back for: of those that save it, the last that forward reached."""


class LeavingGroup(NamedTuple):
    """Storages that are offloaded together: those of one tag that are neither kept nor offloaded before."""

    tag: str
    action: Action  # what is done about it
    tensors: tuple[SavedTensor, ...]  # what leaves with it. Backward comes to it where there is nothing, too.
    starts_at: int  # the segment with which its site begins. The order of groups is that of these.
    ends_after: int  # the segment after whose forward it ends. It is submitted then, unless it is held.
    held_over: int | None
    """The segment before whose forward the host waits, and after whose wait it is submitted. None where it is not held."""
    opened_before_end: int  # how many groups of the layer begin before this one ends, itself with them
    submitted_as: int  # its place in the order in which the groups of the layer end, and are submitted
    asked_before: int  # the segment before whose backward its site first asks for something

    @property
    def size_bytes(self) -> int:
        """Bytes of what leaves with it."""
        return sum(tensor.size_bytes for tensor in self.tensors)


class Rerun(NamedTuple):
    """A unit that runs again in backward."""

    unit: str  # by the name of `fgoffload.tags.RECOMPUTE_UNITS`
    before: int  # the segment before whose backward it runs
    segments: tuple[int, ...]  # that run again, in order
    seconds: tuple[float, ...]  # of compute, by segment
    made: tuple[PlacedTensor, ...]  # what is there again then: `saved_after` is one of `segments`


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedLayer:
    """A layer under a plan. Many layers are one of these, so that what all of them ask for is put together once."""

    layer: LayerModel  # the layer
    kept: tuple[PlacedTensor, ...]  # what stays on the device from forward to backward
    held: tuple[PlacedTensor, ...]  # what runs again and was not saved, but is there until the layer's forward is over
    shared: tuple[SavedTensor, ...]
    """Storages that all layers share. They are kept, and count once a microbatch and chunk: the engine keeps living tables."""
    leaving: tuple[PlacedTensor, ...]  # what leaves
    groups: tuple[LeavingGroup, ...]  # of the tags that are offloaded, in the order in which forward reaches their sites
    reruns: tuple[Rerun, ...]  # what runs again, in the order of backward

    @property
    def kept_bytes(self) -> int:
        """Device bytes of a microbatch between its forward and its backward, once the copies are done; `shared` not counted."""
        return sum(kept.tensor.size_bytes for kept in self.kept)

    @functools.cached_property
    def saved_bytes(self) -> Mapping[int, int]:
        """Device bytes that are there after the forward of a segment and were not before, by segment; below 0 where some go."""
        last = len(self.layer.segments) - 1
        sizes = [(one.saved_after, one.tensor.size_bytes) for one in (*self.kept, *self.leaving, *self.held)]
        sizes += [(last, -one.tensor.size_bytes) for one in self.held]
        sizes += [(last, -self.staged_bytes)]
        return _sum_by_place(sizes)

    @functools.cached_property
    def freed_bytes(self) -> Mapping[int, int]:
        """Device bytes that are gone after the backward of a segment, of what stayed or ran again, by segment."""
        made = (one for rerun in self.reruns for one in rerun.made)
        return _sum_by_place((one.freed_after, one.tensor.size_bytes) for one in (*self.kept, *made))

    @functools.cached_property
    def let_go_bytes(self) -> Mapping[tuple[int, str | None], tuple[int, ...]]:
        """Sizes of what sites that stay ask for and is there, by the segment and unit of a `Take`; 0 when asked for again."""
        sizes: dict[tuple[int, str | None], tuple[int, ...]] = {}
        for kept in self.kept:
            asked = [(take.before, take.unit) for take in kept.takes if take.group is None]
            for number, asker in enumerate(asked):
                sizes[asker] = (*sizes.get(asker, ()), 0 if number else kept.tensor.size_bytes)
        return sizes

    @property
    def moved_bytes(self) -> int:
        """Bytes of a microbatch that leave, and come back."""
        return sum(group.size_bytes for group in self.groups)

    @property
    def staged_bytes(self) -> int:
        """Bytes of a microbatch that leave through a staging slot."""
        return sum(one.tensor.size_bytes for one in self.leaving if self.layer.is_staged(one.tensor))

    @property
    def recompute_s(self) -> float:
        """Seconds of compute that backward takes longer."""
        return sum(seconds for rerun in self.reruns for seconds in rerun.seconds)


def _sum_by_place(sizes: Iterable[tuple[int, int]]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for place, size_bytes in sizes:
        sums[place] = sums.get(place, 0) + size_bytes
    return sums


def resolve_layer(
    layer: LayerModel, actions: Mapping[str, Action], *, min_offloaded_numel: int, staying_tags: Set[str] = frozenset()
) -> ResolvedLayer:
    """Return what `actions` make of `layer`. The same arguments give the same object.

    Args:
        layer: A kind of layer.
        actions: What a plan says of it, by tag or unit; what it does not name is kept.
        min_offloaded_numel: Elements. A tensor below this stays.
        staying_tags: Of tensors that something outside of the layer holds: moving them frees nothing, and the engine stops.

    Raises:
        PlanError: The layer cannot do that: with the tags or units, and the fix.
    """
    chosen = frozenset((name, action) for name, action in actions.items() if action is not Action.KEEP)
    return _resolve(layer, chosen, min_offloaded_numel, frozenset(staying_tags))


# Layers of one kind with the same choice are most of a model, and a solver asks for them again and again.
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
    # What a unit covers asks for what the unit makes, and not for what was saved.
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
        is_able = layer.may_leave(one.tensor) and not one.tensor.is_below(min_offloaded_numel)
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
    """Where the tags of a layer are among its segments, whatever a plan says."""

    def __init__(self, layer: LayerModel) -> None:
        self._places = {segment.name: place for place, segment in enumerate(layer.segments)}
        self.last = len(layer.segments) - 1
        self.hold = next((place for place, one in enumerate(layer.segments) if one.host_wait is HostWait.HOLD), None)
        """The first segment over whose host wait groups are held."""
        self.saved = {tensor.name: self.locate(tensor) for tensor in layer.tensors}
        """Saved storages without recompute, by name."""

    def find(self, name: str) -> int:
        """Return the segment called `name`; the first where there is none."""
        return self._places.get(name, 0)

    def locate(self, tensor: SavedTensor) -> PlacedTensor:
        """Return when a tensor is there, where nothing that saves it runs again."""
        # The tag that forward reaches first, wherever it is among them: backward reaches that one last.
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
        """Return the segments that `unit` runs again."""
        return tuple(self._places[name] for name in unit.segments)


def _list_saved(layer: LayerModel, units: Sequence[UnitModel], places: _Places) -> tuple[PlacedTensor, ...]:
    """Return what is saved in forward where `units` run again: what they drop is not, and what they keep instead is."""
    dropped = {name for unit in units for name in unit.drops}
    saved = {name: one for name, one in places.saved.items() if name not in dropped}
    for unit in units:
        dropped_by_others = {name for other in units if other is not unit for name in other.drops}
        first = places.list_segments(unit)[0]
        for tensor in unit.keeps:
            if tensor.name not in dropped_by_others:
                # The unit's input: there before it runs, and wanted until backward has left it.
                saved.setdefault(tensor.name, PlacedTensor(tensor, saved_after=first, freed_after=first))
    return tuple(saved.values())


def _list_reruns(
    layer: LayerModel, units: Sequence[UnitModel], saved: Sequence[PlacedTensor], places: _Places
) -> tuple[Rerun, ...]:
    """Return what runs again, in the order of backward; what runs before the same segment in the order of forward."""
    tensors = {tensor.name: tensor for tensor in layer.tensors}
    before = _find_when(units, tensors, places)
    # What a unit keeps, as its input, is there and not made again; what two units drop, the first of them makes.
    made, reruns = {one.tensor.name for one in saved}, []
    for unit in sorted(units, key=lambda unit: (-before[unit.name], places.list_segments(unit)[0])):
        segments = places.list_segments(unit)
        names = [name for name in unit.drops if name in tensors and name not in made]
        made.update(names)
        seconds = [unit.forward_part * layer.segments[place].forward_s for place in segments]
        seconds[-1] += unit.extra_s
        # What the unit hands on is saved by the segment behind it: it is there when the unit is through.
        found = [places.saved[name] for name in names]
        again = [one if one.saved_after in segments else one._replace(saved_after=segments[-1]) for one in found]
        if unit.extra_bytes:
            beside = SavedTensor(name=f"beside what {unit.name} makes", tags=(unit.name,), size_bytes=unit.extra_bytes)
            again.append(PlacedTensor(beside, saved_after=segments[-1], freed_after=segments[-1]))
        reruns.append(Rerun(unit.name, before[unit.name], segments, tuple(seconds), tuple(again)))
    return tuple(reruns)


def _find_when(units: Sequence[UnitModel], tensors: Mapping[str, SavedTensor], places: _Places) -> dict[str, int]:
    """Return the segment before whose backward each unit runs again, by its name."""
    before: dict[str, int] = {}
    readers: list[tuple[frozenset[int], int]] = []
    # From the last of forward: a unit that makes what another reads when that one runs again has to run before it.
    for unit in sorted(units, key=lambda unit: places.list_segments(unit)[0], reverse=True):
        made = {places.find(tag) for name in unit.drops if name in tensors for tag in tensors[name].tags}
        before[unit.name] = max([places.find(unit.before), *(place for segments, place in readers if segments & made)])
        readers.append((frozenset(places.list_segments(unit)), before[unit.name]))
    return before


def _list_takes(
    one: PlacedTensor,
    offloaded: Sequence[str],
    covered: Set[str],
    again: Sequence[tuple[Rerun, Set[str]]],
    places: _Places,
) -> tuple[Take, ...]:
    """Return who asks for `one`: the segments of its tags but those `covered`, and what runs `again` and reads it."""
    found = [(places.find(tag), tag) for tag in one.tensor.tags if tag not in covered]
    askers = set()
    for rerun, read in again:
        askers |= {(rerun.before, rerun.unit, tag) for place, tag in found if place in rerun.segments or tag in read}
    # A module that runs again as a whole asks for its input then, and not again in the backward of what it made.
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
    """Return the groups of the tags `offloaded`, not yet with what leaves with them."""
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
