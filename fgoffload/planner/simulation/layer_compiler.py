"""Compiles a layer into the events of its passes under a plan. `chunk_events` defines the events.

[Note: Tensors that dispatchers keep]
A token dispatcher keeps the routing probabilities of its last forward, and with them their autograd graph. If a checkpoint of
the layer or of its experts recomputed that forward, the graph holds the checkpoint's [s, b, h] input and, after backward, that
input's gradient. Both stay on the GPU until the next forward replaces the probabilities, so each step starts with the tensors
of the previous one. This package makes dispatchers free them; we count them for runs without it (`RankModel.has_engine`).
Source: `dispatch_preprocess` of megatron/core/transformer/moe/token_dispatcher.py and `CheckpointFunction` of
megatron/core/tensor_parallel/random.py, megatron-core 0.16.1.

[Note: Host waits in a recompute]
In a recompute, the host waits only if the unit contains a token dispatcher: `layer` and `moe` do, but the experts' first linear
does not. The host already has the token counts from forward (docs/decisions.md), so it does not wait for counts that a kernel
writes (`HostWait.KERNEL`) and stays ahead of the device. All other waits are the same as in forward.

[Note: Tensors that the model references]
`GPTModel.forward` references the embedding's output until it returns the loss. This keeps the first layer's input on the GPU
until then, even if the input is offloaded. On later stages, the pipeline schedule references that input until backward.
Source: `decoder_input` in megatron/core/models/gpt/gpt_model.py, megatron-core 0.16.1.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from fgoffload.planner.ranks.layer_model import HostWait, SavedTensor, Segment
from fgoffload.planner.ranks.rank_model import NumberedLayer
from fgoffload.planner.simulation.chunk_events import Bundle, Compute, EventKind, Events, PlacedGroup, Take, TrafficKey
from fgoffload.planner.simulation.layer_choice import PlacedTensor, Recompute, ResolvedLayer
from fgoffload.tags import find_recompute_unit
from fgoffload.watched import Watched, find_watched

Item = TypeVar("Item")

_PROJECTION = "attn_proj"  # last segment of the attention half of a layer
_ROUTER = "router"  # segment after which a token dispatcher gets the probabilities; only in MoE layers


class LayerRules(NamedTuple):
    """Settings shared by all layers of a rank."""

    has_copies: bool  # whether any tensor is offloaded
    has_engine: bool  # see `RankModel.has_engine`
    host_s: float  # host seconds of a layer's forward or backward
    merges: bool  # whether to merge adjacent compute


class EventList:
    """Builds the events of a pass. With `merges`, it merges adjacent compute into one event."""

    def __init__(self, *, merges: bool) -> None:
        self._merges = merges
        self._events: list[tuple[EventKind, object]] = []
        self._last: Compute | None = None  # event into which the next compute can be merged

    def compute(self, label: str, seconds: float, extra_bytes: int, net_bytes: int = 0, *, host_s: float = 0.0) -> None:
        """Add compute that needs `extra_bytes` of temporaries and changes the device bytes by `net_bytes`."""
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
    """Compiles one layer of a chunk."""

    def __init__(
        self, numbered: NumberedLayer, chunk: int, resolved: ResolvedLayer, rules: LayerRules, *, has_referenced_input: bool
    ) -> None:
        self._resolved = resolved
        self._layer = numbered.model
        self._segments = numbered.model.segments
        self._has_copies = rules.has_copies
        self._has_referenced_input = has_referenced_input
        self._host_s = rules.host_s / len(self._segments)  # host seconds per segment
        self._name = f"layers.{numbered.number}."
        self._keeper = None if rules.has_engine else _find_keeper(resolved)
        """Recompute of a dispatcher that keeps tensors, or None. See [Note: Tensors that dispatchers keep]."""
        self._dispatcher = (chunk, numbered.number)
        self._is_recomputed = any(recompute.unit == "layer" for recompute in resolved.recomputes)
        """Whether the whole layer is recomputed. Its checkpoint saves only the input, so the engine sees no tensors inside."""
        names = [segment.name for segment in self._segments]
        self._after_attention = names.index(_PROJECTION) + 1 if _PROJECTION in names else len(names)
        """First segment after attention."""
        tags = {group.tag for group in resolved.groups}
        watched = find_watched(tags, shares_router_input=self._layer.shares_router_input)
        self._is_watched = watched.covers_layer or (watched is Watched.ATTENTION and self._after_attention == len(names))
        """Whether the engine watches all ops of the layer. Watching attention is enough if the layer has nothing after it."""
        self._watched_places = len(names) if self._is_watched else self._after_attention * (watched is Watched.ATTENTION)
        """Number of watched segments at the start of the layer."""
        self._base = 0  # number of groups in earlier layers of the chunk
        self._bundles: list[tuple[PlacedTensor, int]] = []
        """One tensor of each bundle, and the bundle's index. The engine copies and frees the tensors of a bundle together."""
        self._takes: dict[tuple[int, str | None], list[Take]] = {}
        """Tensors that backward needs, keyed by the segment that runs next in backward and the unit recomputed before it."""

    def add_groups(self, groups: list[PlacedGroup], bundles: list[Bundle]) -> None:
        """Append the groups and bundles of this layer to those of earlier layers."""
        self._base = len(groups)
        alike: dict[object, list[PlacedTensor]] = {}
        for one in self._resolved.offloaded:
            if self._has_referenced_input and _is_input(one.tensor):
                one = one._replace(used_until=len(self._segments))
            alike.setdefault((one.offloaded_by, one.reloaded_for, one.takes, one.freed_after, one.used_until), []).append(one)
        for tensors in alike.values():
            group = self._resolved.groups[tensors[0].offloaded_by]
            self._bundles.append((tensors[0], len(bundles)))
            bundles.append(
                Bundle(
                    size_bytes=sum(one.tensor.size_bytes for one in tensors),
                    device_bytes=sum(one.tensor.size_bytes for one in tensors if not self._layer.is_staged(one.tensor)),
                    label=f"reload of {self._name}{group.tag}",
                    traffic_key=TrafficKey(self._layer.kind, group.tag, group.action),
                    is_read_later=self._is_read_later(tensors[0]),
                )
            )
        for index, group in enumerate(self._resolved.groups):
            groups.append(
                PlacedGroup(
                    label=self._name + group.tag,
                    bundles=tuple(bundle for one, bundle in self._bundles if one.offloaded_by == index),
                    members=tuple(bundle for one, bundle in self._bundles if group.tag in one.tensor.tags),
                    end_position=self._base + group.opened_before_end,
                    tensors=len(group.tensors),
                )
            )
        self._note_takes()

    def _note_takes(self) -> None:
        needed: dict[tuple[int, str | None], dict[int | None, list[int]]] = {}
        for one, bundle in self._bundles:
            for take in one.takes:
                needed.setdefault((take.before, take.unit), {}).setdefault(take.group, []).append(bundle)
        found = {group for groups in needed.values() for group in groups}
        for index, group in enumerate(self._resolved.groups):
            # All tensors of this group stay on the GPU, but backward still reaches the group.
            if index not in found:
                needed.setdefault((group.needed_before, None), {})[index] = []
        for key, groups in needed.items():
            # Groups in backward order, then tensors of sites without a group.
            order = sorted(groups, key=lambda group: -1 if group is None else group, reverse=True)
            self._takes[key] = [Take(None if one is None else self._base + one, tuple(groups[one])) for one in order]

    def list_read_last(self) -> Iterable[int]:
        """Return the bundles that the model references until the end of its forward."""
        return (bundle for one, bundle in self._bundles if one.used_until == len(self._segments))

    def _is_read_later(self, one: PlacedTensor) -> bool:
        group = self._resolved.groups[one.offloaded_by]
        return one.used_until > (group.ends_after if group.held_until is None else group.held_until)

    def run_forward(self, events: EventList) -> None:
        """Add the events of the layer's forward."""
        groups = sorted(enumerate(self._resolved.groups, start=self._base), key=lambda pair: pair[1].submit_place)
        starts = {group.starts_at for _, group in groups}
        held = _group_by_place((group.held_until, index) for index, group in groups if group.held_until is not None)
        ended = _group_by_place((group.ends_after, index) for index, group in groups if group.held_until is None)
        read = _group_by_place((one.used_until, bundle) for one, bundle in self._bundles if self._is_read_later(one))
        if self._has_copies and not self._is_recomputed:
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
        """Add the events of the layer's backward, including its recomputes."""
        recomputes = _group_by_place((recompute.before, recompute) for recompute in self._resolved.recomputes)
        freed = _group_by_place((one.freed_after, bundle) for one, bundle in self._bundles)
        starts = [group.starts_at for group in self._resolved.groups]
        for place in range(len(self._segments) - 1, -1, -1):
            segment = self._segments[place]
            for recompute in recomputes.get(place, ()):
                self._take(events, place, recompute.unit)
                self._run_recompute(events, recompute)
            self._take(events, place, None)
            events.run_backward(segment, self._name, -self._resolved.freed_bytes.get(place, 0), host_s=self._host_s)
            if self._keeper is not None and place == self._keeper.segments[0]:
                # The checkpoint's input and its gradient. Until here, they counted as a saved tensor and a temporary.
                events.add(EventKind.RETAIN, (self._dispatcher, 2 * _count_input_bytes(self._resolved)))
            if place in freed:
                events.add(EventKind.FREE, tuple(freed[place]))
            if self._base == 0 and starts and starts[0] == place:
                events.add(EventKind.POLL)
            if place == self._after_attention:
                self._pass(events, self._base + sum(start < place for start in starts))
        self._pass(events, self._base)

    def _pass(self, events: EventList, groups: int) -> None:
        """Add a `PASSED` event, unless the layer is watched or recomputed as a whole, or backward has no `groups` left."""
        if groups and not self._is_watched and not self._is_recomputed:
            events.add(EventKind.PASSED)

    def _run_recompute(self, events: EventList, recompute: Recompute) -> None:
        has_dispatcher = _runs_dispatcher(recompute)
        for place, seconds in zip(recompute.segments, recompute.seconds, strict=True):
            segment = self._segments[place]
            # See [Note: Host waits in a recompute].
            if has_dispatcher and segment.host_wait is not HostWait.KERNEL:
                self._wait_for_host(events, segment)
            net_bytes = sum(one.tensor.size_bytes for one in recompute.tensors if one.saved_after == place)
            label = f"{self._name}{segment.name} recompute"
            events.compute(label, seconds, segment.forward_extra_bytes, net_bytes, host_s=self._host_s)
            self._dispatch(events, segment)

    def _wait_for_host(self, events: EventList, segment: Segment) -> None:
        if self._has_copies and segment.host_wait is not None:
            events.add(EventKind.HOST_WAIT, segment.host_wait)

    def _dispatch(self, events: EventList, segment: Segment) -> None:
        if self._keeper is not None and segment.name == _ROUTER:
            events.add(EventKind.DISPATCH, self._dispatcher)

    def _take(self, events: EventList, place: int, unit: str | None) -> None:
        """Add events for the tensors needed by the recompute of `unit` or, if it is None, by the backward of a segment.

        Here, the engine also releases tensors of sites without offload. `TAKE` events show that backward is at their group.
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


def _find_keeper(resolved: ResolvedLayer) -> Recompute | None:
    has_router = any(segment.name == _ROUTER for segment in resolved.layer.segments)
    return next(filter(_runs_dispatcher, resolved.recomputes), None) if has_router else None


def _runs_dispatcher(recompute: Recompute) -> bool:
    """Return whether a recompute runs a token dispatcher, as `layer` and `moe` do."""
    unit = find_recompute_unit(recompute.unit)
    return unit is not None and _ROUTER in unit.covers


def _count_input_bytes(resolved: ResolvedLayer) -> int:
    """Return the bytes of an [s, b, h] tensor on this rank, such as the layer's input."""
    return max((tensor.size_bytes for tensor in resolved.layer.tensors if _is_input(tensor)), default=0)


def _is_input(tensor: SavedTensor) -> bool:
    return "layer_input" in tensor.tags and not tensor.is_same_in_all_layers
