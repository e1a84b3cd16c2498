"""From a layer and what a plan says of it to the steps of its passes: see `chunk_program`.

[Note: What dispatchers hold]
A token dispatcher keeps the routing probabilities of its last forward, and with them the graph behind. Where a checkpoint of
the layer, or of its experts, ran that forward again, the graph begins in the checkpoint's own leaf: its input of [s, b, h] and,
after backward, the gradient of that. Both stay until the dispatcher gets the probabilities of another forward. So a step begins
with those of all layers, from the step before. This package makes dispatchers let go (docs/decisions.md); where it does not
run, `RankModel.has_engine` is False, and they count.

[Note: Waits of a recompute]
In a recompute the host waits only where a token dispatcher runs again, which `layer` and `moe` do, and the first linear of the
experts, behind the dispatcher, does not. It has the counts of the forward then (docs/decisions.md), and waits for none that a
kernel would write, `HostWait.KERNEL`: it stays as far ahead as it was. Other waits are as in forward. Where this package does
not run nothing leaves, and nobody asks where the host is.

[Note: What the model holds]
`GPTModel.forward` has a name for the embedding's output until it returns, loss and all. So the first layer's input, where it
leaves, goes no earlier. In other stages the pipeline's schedule has it until backward.

Source: `decoder_input` in `GPTModel.forward`, megatron/core/models/gpt/gpt_model.py, megatron-core 0.16.1; for dispatchers,
`dispatch_preprocess` of megatron/core/transformer/moe/token_dispatcher.py and `CheckpointFunction` of
megatron/core/tensor_parallel/random.py, megatron-core 0.16.1. Between two steps of six layers with full recompute an H200 held
773 MiB more than without: 768 are these, 128 MiB a layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from fgoffload.plan import Action
from fgoffload.planner.ranks.layer_model import HostWait, SavedTensor, Segment
from fgoffload.planner.ranks.rank_model import NumberedLayer
from fgoffload.planner.simulation.chunk_program import (
    ComputeStep,
    DispatchStep,
    FreeStep,
    GroupPlace,
    HoldStep,
    HostWaitStep,
    LetGoStep,
    Mover,
    OpenStep,
    Parcel,
    Part,
    PassedStep,
    PollStep,
    ReadStep,
    Step,
    SubmitStep,
    TakeStep,
)
from fgoffload.planner.simulation.layer_choice import LeavingTensor, Rerun, ResolvedLayer
from fgoffload.tags import find_recompute_unit
from fgoffload.watched import Watched, find_watched

Item = TypeVar("Item")

_PROJECTION = "attn_proj"
"""The stretch with which the attention half of a layer ends."""

_ROUTER = "router"
"""The stretch behind which a token dispatcher gets probabilities. Layers without experts have none."""


class StepList:
    """Steps in the making: compute without anything between is put together."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._parts: list[Part] = []
        self._host_s = 0.0

    def compute(self, part: Part, *, host_s: float = 0.0) -> None:
        """Add a stretch of compute, which takes the host so long."""
        self._parts.append(part)
        self._host_s += host_s

    def add(self, step: Step) -> None:
        """Add what is no compute."""
        self._close()
        self._steps.append(step)

    def finish(self) -> tuple[Step, ...]:
        """Return what was added."""
        self._close()
        return tuple(self._steps)

    def _close(self) -> None:
        if not self._parts:
            return
        seconds, net_bytes, rise_bytes, peak_label = 0.0, 0, 0, self._parts[0].label
        for part in self._parts:
            highest = net_bytes + max(part.extra_bytes, part.net_bytes)
            if highest > rise_bytes:
                rise_bytes, peak_label = highest, part.label
            seconds += part.seconds
            net_bytes += part.net_bytes
        self._steps.append(ComputeStep(tuple(self._parts), seconds, net_bytes, rise_bytes, peak_label, self._host_s))
        self._parts, self._host_s = [], 0.0


class LayerCompiler:
    """One layer of a chunk, under a plan.

    Args:
        numbered: The layer.
        resolved: What the plan makes of it.
        actions: What the plan says of it, by tag or unit.
        has_copies: Whether anything leaves on the rank.
        dispatcher: Chunk and number of the layer where its token dispatcher may hold what a recompute began with, or None.
        has_held_input: Whether the model holds the layer's input until its forward is over. See [Note: What the model holds].
        host_s: Seconds that its forward takes the host, or its backward.
    """

    def __init__(
        self,
        numbered: NumberedLayer,
        resolved: ResolvedLayer,
        actions: Mapping[str, Action],
        *,
        has_copies: bool,
        dispatcher: tuple[int, int] | None,
        has_held_input: bool,
        host_s: float,
    ) -> None:
        self._end = len(numbered.model.segments)
        """Where what the model holds is read last: behind all stretches."""
        if has_held_input:
            leaving = (one._replace(used_until=self._end) if _is_input(one.tensor) else one for one in resolved.leaving)
            resolved = replace(resolved, leaving=tuple(leaving))
        self.resolved = resolved
        self._kind = numbered.model.kind
        self._actions = actions
        self._segments = numbered.model.segments
        self._host_s = host_s / len(self._segments)
        """Of the host, for a stretch."""
        self._name = f"layers.{numbered.number}"
        self._has_copies = has_copies
        self._holder = _find_holder(resolved)
        self._dispatcher = None if self._holder is None else dispatcher
        self._shares_router_input = numbered.model.shares_router_input
        self._behind_attention = _find_behind_attention(self._segments)
        """The first stretch behind attention, or None where there is none."""
        self._watched = self._find_watched()
        self._base = 0
        """The groups of the chunk before those of this layer."""
        self._parcels: list[tuple[LeavingTensor, int]] = []
        """One of the tensors of each parcel, which are alike but for their size, and the parcel's number."""
        self._asked: dict[tuple[int, str | None], dict[int | None, list[int]]] = {}
        """Parcels that backward asks for, by the stretch before which it does and the unit that runs again there, and by group
        of the site."""

    def number_groups(self, groups: list[GroupPlace], parcels: list[Parcel]) -> None:
        """Add the groups and parcels of this layer to those of the layers before it."""
        self._base = len(groups)
        alike: dict[object, list[LeavingTensor]] = {}
        for one in self.resolved.leaving:
            alike.setdefault((one.leaves_with, one.returns_for, one.takes, one.freed_after, one.used_until), []).append(one)
        for tensors in alike.values():
            tag = self.resolved.groups[tensors[0].leaves_with].tag
            self._parcels.append((tensors[0], len(parcels)))
            size_bytes = sum(one.tensor.size_bytes for one in tensors)
            device_bytes = sum(one.tensor.size_bytes for one in tensors if not self.resolved.layer.is_staged(one.tensor))
            label, mover = f"reload of {self._name}.{tag}", self._find_mover(tag)
            parcels.append(Parcel(size_bytes, device_bytes, label, mover, self._is_read_later(tensors[0])))
        self._note_asked()
        for index, group in enumerate(self.resolved.groups):
            groups.append(
                GroupPlace(
                    label=f"{self._name}.{group.tag}",
                    mover=self._find_mover(group.tag),
                    parcels=tuple(parcel for one, parcel in self._parcels if one.leaves_with == index),
                    members=tuple(parcel for one, parcel in self._parcels if group.tag in one.tensor.tags),
                    end_position=self._base + group.opened_before_end,
                )
            )

    def _note_asked(self) -> None:
        for one, parcel in self._parcels:
            for take in one.takes:
                self._asked.setdefault((take.before, take.unit), {}).setdefault(take.group, []).append(parcel)
        asking = {group for groups in self._asked.values() for group in groups}
        for index, group in enumerate(self.resolved.groups):
            # All that such a group saved stayed, and backward comes to it all the same.
            if index not in asking:
                self._asked.setdefault((group.asked_before, None), {})[index] = []

    @property
    def held_parcels(self) -> tuple[int, ...]:
        """Return what leaves and is held until the model's forward is over."""
        return tuple(parcel for one, parcel in self._parcels if one.used_until == self._end)

    def _find_mover(self, tag: str) -> Mover:
        return Mover(kind=self._kind, tag=tag, action=self._actions[tag])

    def _is_read_later(self, one: LeavingTensor) -> bool:
        group = self.resolved.groups[one.leaves_with]
        return one.used_until > (group.ends_after if group.held_over is None else group.held_over)

    def run_forward(self, steps: StepList) -> None:
        """Add the forward of the layer."""
        groups = sorted(enumerate(self.resolved.groups, start=self._base), key=lambda pair: pair[1].submitted_as)
        starts = {group.starts_at for _, group in groups}
        held = _group_by_place((group.held_over, index) for index, group in groups if group.held_over is not None)
        ended = _group_by_place((group.ends_after, index) for index, group in groups if group.held_over is None)
        read = _group_by_place((one.used_until, parcel) for one, parcel in self._parcels if self._is_read_later(one))
        saved_bytes = self.resolved.saved_bytes
        if self._has_copies and not self._runs_again_as_a_whole:
            steps.add(PollStep())
        for place, segment in enumerate(self._segments):
            if place in starts:
                steps.add(OpenStep())
            self._wait_for_host(steps, segment)
            for index in held.get(place, ()):
                steps.add(SubmitStep(index))
            net_bytes = saved_bytes.get(place, 0)
            steps.compute(
                Part(f"{self._name}.{segment.name}", segment.forward_pass_s, segment.forward_extra_bytes, net_bytes),
                host_s=self._host_s,
            )
            if place in read:
                steps.add(ReadStep(tuple(read[place])))
            for index in ended.get(place, ()):
                steps.add(SubmitStep(index))
            self._dispatch(steps, segment)

    def run_backward(self, steps: StepList) -> None:
        """Add the backward of the layer, and what runs again in it."""
        reruns = _group_by_place((rerun.before, rerun) for rerun in self.resolved.reruns)
        freed = _group_by_place((one.freed_after, parcel) for one, parcel in self._parcels)
        freed_bytes = self.resolved.freed_bytes
        for place in range(len(self._segments) - 1, -1, -1):
            segment = self._segments[place]
            for rerun in reruns.get(place, ()):
                self._take(steps, place, rerun.unit)
                self._run_again(steps, rerun)
            self._take(steps, place, None)
            gone_bytes = freed_bytes.get(place, 0)
            steps.compute(
                Part(f"{self._name}.{segment.name}", segment.backward_s, segment.backward_extra_bytes, -gone_bytes),
                host_s=self._host_s,
            )
            if self._dispatcher is not None and self._holder is not None and place == self._holder.segments[0]:
                # Input and gradient: the first was counted as saved until now, the second among what backward needs.
                steps.add(HoldStep(self._dispatcher, 2 * _count_input_bytes(self.resolved)))
            if place in freed:
                steps.add(FreeStep(tuple(freed[place])))
            if self._base == 0 and self.resolved.groups and self.resolved.groups[0].starts_at == place:
                steps.add(PollStep())
            if place == self._behind_attention:
                self._pass(steps, self._base + sum(group.starts_at < place for group in self.resolved.groups))
        self._pass(steps, self._base)

    def _pass(self, steps: StepList, groups: int) -> None:
        """Backward has passed the MLP, or all, of a layer that is not watched there; in front of that are so many groups."""
        if groups and not self._watched.covers_layer and not self._runs_again_as_a_whole:
            steps.add(PassedStep())

    def _find_watched(self) -> Watched:
        """Return which ops of the layer the engine watches: all of them where only attention would be and nothing is behind."""
        tags = {group.tag for group in self.resolved.groups}
        watched = find_watched(tags, shares_router_input=self._shares_router_input)
        is_whole = watched is Watched.ATTENTION and self._behind_attention is None
        return Watched.LAYER if is_whole else watched

    def _is_watched(self, place: int) -> bool:
        behind = self._behind_attention
        return self._watched.covers_layer or (self._watched is Watched.ATTENTION and behind is not None and place < behind)

    def _run_again(self, steps: StepList, rerun: Rerun) -> None:
        has_dispatcher = _runs_dispatcher(rerun)
        for place in rerun.segments:
            segment = self._segments[place]
            # See [Note: Waits of a recompute].
            if has_dispatcher and segment.host_wait is not HostWait.KERNEL:
                self._wait_for_host(steps, segment)
            net_bytes = sum(one.tensor.size_bytes for one in rerun.made if one.saved_after == place)
            again_s = rerun.forward_part * segment.forward_s + (rerun.extra_s if place == rerun.segments[-1] else 0.0)
            label = f"{self._name}.{segment.name} again"
            steps.compute(Part(label, again_s, segment.forward_extra_bytes, net_bytes), host_s=self._host_s)
            self._dispatch(steps, segment)

    def _wait_for_host(self, steps: StepList, segment: Segment) -> None:
        if self._has_copies and segment.host_wait is not None:
            steps.add(HostWaitStep(takes_link=segment.host_wait is not HostWait.KERNEL))

    def _dispatch(self, steps: StepList, segment: Segment) -> None:
        if self._dispatcher is not None and segment.name == _ROUTER:
            steps.add(DispatchStep(self._dispatcher))

    def _take(self, steps: StepList, place: int, unit: str | None) -> None:
        """Add who asks for something before the backward of stretch `place`: `unit` when it runs again, or the stretch."""
        if self._is_watched(place):
            self._let_go(steps, place, unit)
        asked = self._asked.get((place, unit))
        if asked is None:
            return
        for asker in sorted(asked, key=lambda asker: -1 if asker is None else asker, reverse=True):
            steps.add(TakeStep(None if asker is None else self._base + asker, tuple(asked[asker])))

    @property
    def _runs_again_as_a_whole(self) -> bool:
        """Return whether a checkpoint is around the layer: it holds the input, and the engine sees nothing of the layer."""
        return any(rerun.unit == "layer" for rerun in self.resolved.reruns)

    def _let_go(self, steps: StepList, place: int, unit: str | None) -> None:
        """Add what sites that stay ask for and is there. What a group saved tells instead that backward is at that group."""
        sizes_bytes = self.resolved.let_go_bytes.get((place, unit))
        if sizes_bytes:
            steps.add(LetGoStep(sizes_bytes))


def _group_by_place(found: Iterable[tuple[int, Item]]) -> dict[int, list[Item]]:
    groups: dict[int, list[Item]] = {}
    for place, one in found:
        groups.setdefault(place, []).append(one)
    return groups


def _find_behind_attention(segments: Sequence[Segment]) -> int | None:
    names = [segment.name for segment in segments]
    place = names.index(_PROJECTION) + 1 if _PROJECTION in names else len(names)
    return place if place < len(names) else None


def _find_holder(resolved: ResolvedLayer) -> Rerun | None:
    """Return what runs a dispatcher of the layer again from a leaf of its own, or None. See [Note: What dispatchers hold]."""
    names = [segment.name for segment in resolved.layer.segments]
    if _ROUTER not in names:
        return None
    return next(filter(_runs_dispatcher, resolved.reruns), None)


def _runs_dispatcher(rerun: Rerun) -> bool:
    """Return whether a token dispatcher runs again: not with a norm, an activation, a first linear or shared experts."""
    unit = find_recompute_unit(rerun.unit)
    return unit is not None and _ROUTER in unit.covers


def _count_input_bytes(resolved: ResolvedLayer) -> int:
    """Return the bytes of [s, b, h] on this rank: of the layer's input, and of what the norm behind attention returns."""
    return max((tensor.size_bytes for tensor in resolved.layer.tensors if _is_input(tensor)), default=0)


def _is_input(tensor: SavedTensor) -> bool:
    return "layer_input" in tensor.tags and not tensor.is_same_in_all_layers
