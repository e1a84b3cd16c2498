"""Compiles a layer under a plan to the events of its passes: see `chunk_events`.

[Note: Tensors that dispatchers keep]
A token dispatcher keeps the routing probabilities of its last forward, and with them their autograd graph. If a checkpoint of
the layer or of its experts recomputed that forward, the graph starts at the checkpoint's own leaf: its [s, b, h] input and,
after backward, the gradient of that input. Both stay on the GPU until the dispatcher gets the probabilities of another forward,
so each step starts with the tensors of the previous one. This package makes dispatchers release them; without it we count them
(`RankModel.has_engine`).
Source: `dispatch_preprocess` of megatron/core/transformer/moe/token_dispatcher.py and `CheckpointFunction` of
megatron/core/tensor_parallel/random.py, megatron-core 0.16.1.

[Note: Host waits in a recompute]
In a recompute the host waits only if a token dispatcher is recomputed: with `layer` and `moe`, but not with the experts' first
linear. It already has the token counts from forward (docs/decisions.md), so it does not wait for counts that a kernel writes
(`HostWait.KERNEL`) and keeps its lead over the device. Other waits are the same as in forward.

[Note: Tensors that the model references]
`GPTModel.forward` references the embedding's output until it returns the loss, so an offloaded input of the first layer is not
freed before then. On other stages the pipeline schedule references the input of the first layer until backward.
Source: `decoder_input` in megatron/core/models/gpt/gpt_model.py, megatron-core 0.16.1.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from fgoffload.planner.ranks.layer_model import HostWait, SavedTensor, Segment
from fgoffload.planner.ranks.rank_model import NumberedLayer
from fgoffload.planner.simulation.chunk_events import Compute, EventKind, Events, Mover, Parcel, PlacedGroup, Take
from fgoffload.planner.simulation.layer_choice import PlacedTensor, Rerun, ResolvedLayer
from fgoffload.tags import find_recompute_unit
from fgoffload.watched import Watched, find_watched

Item = TypeVar("Item")

_PROJECTION = "attn_proj"  # last segment of the attention half of a layer
_ROUTER = "router"  # segment after which a token dispatcher gets the probabilities; only in MoE layers


class LayerRules(NamedTuple):
    """Settings shared by all layers of a rank."""

    has_copies: bool  # whether anything is offloaded
    has_engine: bool  # as `RankModel.has_engine`
    host_s: float  # host seconds of a layer's forward or backward
    merges: bool  # whether to merge compute, as in `EventList`


class EventList:
    """Builder for the list of events of a pass."""

    def __init__(self, *, merges: bool) -> None:
        self._merges = merges
        self._events: list[tuple[EventKind, object]] = []
        self._last: Compute | None = None  # event that the next compute merges into

    def compute(self, label: str, seconds: float, extra_bytes: int, net_bytes: int = 0, *, host_s: float = 0.0) -> None:
        """Add compute with `extra_bytes` of temporaries, which changes the device bytes by `net_bytes`."""
        last = self._last if self._merges else None
        if last is None:
            last = Compute(0.0, 0, 0, label, 0.0)
            self._events.append((EventKind.COMPUTE, last))
        rise_bytes = last.net_bytes + max(extra_bytes, net_bytes)
        if rise_bytes <= last.rise_bytes:
            rise_bytes, label = last.rise_bytes, last.label
        self._last = Compute(last.seconds + seconds, last.net_bytes + net_bytes, rise_bytes, label, last.host_s + host_s)
        self._events[-1] = (EventKind.COMPUTE, self._last)

    def run_forward(self, segment: Segment, layer: str = "", net_bytes: int = 0, *, host_s: float = 0.0) -> None:
        """Add the forward of a segment of `layer`."""
        self.compute(layer + segment.name, segment.forward_pass_s, segment.forward_extra_bytes, net_bytes, host_s=host_s)

    def run_backward(self, segment: Segment, layer: str = "", net_bytes: int = 0, *, host_s: float = 0.0) -> None:
        """Add the backward of a segment of `layer`."""
        self.compute(layer + segment.name, segment.backward_s, segment.backward_extra_bytes, net_bytes, host_s=host_s)

    def add(self, kind: EventKind, argument: object = None) -> None:
        """Add an event other than compute."""
        self._last = None
        self._events.append((kind, argument))

    def finish(self) -> Events:
        """Return the events."""
        return tuple(self._events)


class LayerCompiler:
    """One layer of a chunk, under a plan."""

    def __init__(
        self, numbered: NumberedLayer, chunk: int, resolved: ResolvedLayer, rules: LayerRules, *, has_held_input: bool
    ) -> None:
        self._resolved = resolved
        self._layer = numbered.model
        self._segments = numbered.model.segments
        self._has_copies = rules.has_copies
        self._has_held_input = has_held_input
        self._host_s = rules.host_s / len(self._segments)  # host seconds of a segment
        self._name = f"layers.{numbered.number}."
        self._keeper = None if rules.has_engine else _find_keeper(resolved)
        """Recompute whose dispatcher keeps tensors, or None. See [Note: Tensors that dispatchers keep]."""
        self._dispatcher = (chunk, numbered.number)
        self._runs_again = any(rerun.unit == "layer" for rerun in resolved.reruns)
        """Whether a checkpoint wraps the whole layer. It saves only the input, and the engine sees nothing inside."""
        names = [segment.name for segment in self._segments]
        self._behind_attention = names.index(_PROJECTION) + 1 if _PROJECTION in names else len(names)
        """First segment after attention."""
        tags = {group.tag for group in resolved.groups}
        watched = find_watched(tags, shares_router_input=self._layer.shares_router_input)
        self._is_watched = watched.covers_layer or (watched is Watched.ATTENTION and self._behind_attention == len(names))
        """Whether the engine watches all ops of the layer, attention included."""
        self._watched_places = len(names) if self._is_watched else self._behind_attention * (watched is Watched.ATTENTION)
        """Number of watched segments, from the first."""
        self._base = 0  # number of groups in earlier layers of the chunk
        self._parcels: list[tuple[PlacedTensor, int]] = []
        """One tensor of each parcel, and the parcel's number. Tensors of a parcel differ only in size."""
        self._takes: dict[tuple[int, str | None], list[Take]] = {}
        """Tensors that backward needs, keyed by the segment before which it needs them and the unit recomputed there."""

    def add_groups(self, groups: list[PlacedGroup], parcels: list[Parcel]) -> None:
        """Add the groups and parcels of this layer to those of earlier layers."""
        self._base = len(groups)
        alike: dict[object, list[PlacedTensor]] = {}
        for one in self._resolved.leaving:
            if self._has_held_input and _is_input(one.tensor):
                one = one._replace(used_until=len(self._segments))
            alike.setdefault((one.leaves_with, one.returns_for, one.takes, one.freed_after, one.used_until), []).append(one)
        for tensors in alike.values():
            group = self._resolved.groups[tensors[0].leaves_with]
            self._parcels.append((tensors[0], len(parcels)))
            parcels.append(
                Parcel(
                    size_bytes=sum(one.tensor.size_bytes for one in tensors),
                    device_bytes=sum(one.tensor.size_bytes for one in tensors if not self._layer.is_staged(one.tensor)),
                    label=f"reload of {self._name}{group.tag}",
                    mover=Mover(self._layer.kind, group.tag, group.action),
                    is_read_later=self._is_read_later(tensors[0]),
                )
            )
        for index, group in enumerate(self._resolved.groups):
            groups.append(
                PlacedGroup(
                    label=self._name + group.tag,
                    parcels=tuple(parcel for one, parcel in self._parcels if one.leaves_with == index),
                    members=tuple(parcel for one, parcel in self._parcels if group.tag in one.tensor.tags),
                    end_position=self._base + group.opened_before_end,
                )
            )
        self._note_takes()

    def _note_takes(self) -> None:
        asked: dict[tuple[int, str | None], dict[int | None, list[int]]] = {}
        for one, parcel in self._parcels:
            for take in one.takes:
                asked.setdefault((take.before, take.unit), {}).setdefault(take.group, []).append(parcel)
        asking = {group for groups in asked.values() for group in groups}
        for index, group in enumerate(self._resolved.groups):
            # All tensors of this group stay on the GPU, but backward still reaches it.
            if index not in asking:
                asked.setdefault((group.asked_before, None), {})[index] = []
        for key, groups in asked.items():
            # The last group of forward first, then tensors that no group needs.
            order = sorted(groups, key=lambda group: -1 if group is None else group, reverse=True)
            self._takes[key] = [Take(None if one is None else self._base + one, tuple(groups[one])) for one in order]

    def list_read_last(self) -> Iterable[int]:
        """Return the parcels that stay referenced until the end of the model's forward."""
        return (parcel for one, parcel in self._parcels if one.used_until == len(self._segments))

    def _is_read_later(self, one: PlacedTensor) -> bool:
        group = self._resolved.groups[one.leaves_with]
        return one.used_until > (group.ends_after if group.held_over is None else group.held_over)

    def run_forward(self, events: EventList) -> None:
        """Add the forward of the layer."""
        groups = sorted(enumerate(self._resolved.groups, start=self._base), key=lambda pair: pair[1].submitted_as)
        starts = {group.starts_at for _, group in groups}
        held = _group_by_place((group.held_over, index) for index, group in groups if group.held_over is not None)
        ended = _group_by_place((group.ends_after, index) for index, group in groups if group.held_over is None)
        read = _group_by_place((one.used_until, parcel) for one, parcel in self._parcels if self._is_read_later(one))
        if self._has_copies and not self._runs_again:
            events.add(EventKind.POLL)
        for place, segment in enumerate(self._segments):
            if place in starts:
                events.add(EventKind.OPEN)
            self._wait_for_host(events, segment)
            for index in held.get(place, ()):
                events.add(EventKind.SUBMIT, index)
            events.run_forward(segment, self._name, self._resolved.saved_bytes.get(place, 0), host_s=self._host_s)
            if place in read:
                events.add(EventKind.READ, tuple(read[place]))
            for index in ended.get(place, ()):
                events.add(EventKind.SUBMIT, index)
            self._dispatch(events, segment)

    def run_backward(self, events: EventList) -> None:
        """Add the backward of the layer, with its recomputes."""
        reruns = _group_by_place((rerun.before, rerun) for rerun in self._resolved.reruns)
        freed = _group_by_place((one.freed_after, parcel) for one, parcel in self._parcels)
        starts = [group.starts_at for group in self._resolved.groups]
        for place in range(len(self._segments) - 1, -1, -1):
            segment = self._segments[place]
            for rerun in reruns.get(place, ()):
                self._take(events, place, rerun.unit)
                self._run_again(events, rerun)
            self._take(events, place, None)
            events.run_backward(segment, self._name, -self._resolved.freed_bytes.get(place, 0), host_s=self._host_s)
            if self._keeper is not None and place == self._keeper.segments[0]:
                # Input and gradient. So far the input counted as saved, and the gradient as a temporary of backward.
                events.add(EventKind.RETAIN, (self._dispatcher, 2 * _count_input_bytes(self._resolved)))
            if place in freed:
                events.add(EventKind.FREE, tuple(freed[place]))
            if self._base == 0 and starts and starts[0] == place:
                events.add(EventKind.POLL)
            if place == self._behind_attention:
                self._pass(events, self._base + sum(start < place for start in starts))
        self._pass(events, self._base)

    def _pass(self, events: EventList, groups: int) -> None:
        """Add the event that backward has passed the MLP or all of an unwatched layer, if groups come before it."""
        if groups and not self._is_watched and not self._runs_again:
            events.add(EventKind.PASSED)

    def _run_again(self, events: EventList, rerun: Rerun) -> None:
        has_dispatcher = _runs_dispatcher(rerun)
        for place, seconds in zip(rerun.segments, rerun.seconds, strict=True):
            segment = self._segments[place]
            # See [Note: Host waits in a recompute].
            if has_dispatcher and segment.host_wait is not HostWait.KERNEL:
                self._wait_for_host(events, segment)
            net_bytes = sum(one.tensor.size_bytes for one in rerun.made if one.saved_after == place)
            label = f"{self._name}{segment.name} again"
            events.compute(label, seconds, segment.forward_extra_bytes, net_bytes, host_s=self._host_s)
            self._dispatch(events, segment)

    def _wait_for_host(self, events: EventList, segment: Segment) -> None:
        if self._has_copies and segment.host_wait is not None:
            events.add(EventKind.HOST_WAIT, segment.host_wait)

    def _dispatch(self, events: EventList, segment: Segment) -> None:
        if self._keeper is not None and segment.name == _ROUTER:
            events.add(EventKind.DISPATCH, self._dispatcher)

    def _take(self, events: EventList, place: int, unit: str | None) -> None:
        """Add the tensors needed before the backward of a segment: by the recompute of `unit`, or by the segment.

        Tensors of sites on the device are released there. Tensors of a group show that backward has reached it.
        """
        sizes_bytes = self._resolved.released_bytes.get((place, unit))
        if sizes_bytes and place < self._watched_places:
            events.add(EventKind.RELEASE, sizes_bytes)
        for take in self._takes.get((place, unit), ()):
            events.add(EventKind.TAKE, take)


def _group_by_place(found: Iterable[tuple[int, Item]]) -> dict[int, list[Item]]:
    groups: dict[int, list[Item]] = {}
    for place, one in found:
        groups.setdefault(place, []).append(one)
    return groups


def _find_keeper(resolved: ResolvedLayer) -> Rerun | None:
    has_router = any(segment.name == _ROUTER for segment in resolved.layer.segments)
    return next(filter(_runs_dispatcher, resolved.reruns), None) if has_router else None


def _runs_dispatcher(rerun: Rerun) -> bool:
    """Return whether `rerun` includes a token dispatcher. Norms, activations, first linears and shared experts do not."""
    unit = find_recompute_unit(rerun.unit)
    return unit is not None and _ROUTER in unit.covers


def _count_input_bytes(resolved: ResolvedLayer) -> int:
    """Return the bytes of an [s, b, h] tensor on this rank, such as the layer's input."""
    return max((tensor.size_bytes for tensor in resolved.layer.tensors if _is_input(tensor)), default=0)


def _is_input(tensor: SavedTensor) -> bool:
    return "layer_input" in tensor.tags and not tensor.is_same_in_all_layers
