"""Builds a layer's model, including the time of each segment, from the layer's shape and the device.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer, at the efficiency of its kind
(`Efficiency`), plus a short gap. A layer takes at least the time that the host needs to launch its kernels.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from fgoffload.cuda_graphs import NO_CAPTURE, Graphs, find_captured
from fgoffload.planner.memory.recompute_units import make_units
from fgoffload.planner.memory.saved_bytes import list_saved_tensors
from fgoffload.planner.memory.temporaries import ExtraBytes, count_extra_bytes
from fgoffload.planner.model.layer_shape import LayerShape
from fgoffload.planner.operations.attention_ops import list_attention_work, list_input_traffic, list_output_traffic
from fgoffload.planner.operations.layer_sizes import LayerSizes, make_linear
from fgoffload.planner.operations.mlp_ops import list_mlp_work
from fgoffload.planner.operations.ops import (
    FULL_HEAD_CHANNELS,
    Execution,
    Limit,
    PassWork,
    Pattern,
    SegmentWork,
    Traffic,
    Work,
    make_moves,
)
from fgoffload.planner.ranks.captured_layer import capture_layer
from fgoffload.planner.ranks.layer_model import HostWait, LayerModel, Segment, UnitModel
from fgoffload.planner.timing.efficiency import ASSUMED_MEMORY, Efficiency
from fgoffload.planner.timing.hardware import Hardware, get_rate
from fgoffload.planner.timing.network_rates import make_network_rates

DEFAULT_EFFICIENCY = Efficiency()
DEFAULT_EXECUTION = Execution()

GRAPH_LAUNCHES = 3
"""Host time to launch the CUDA graph of a layer's forward or backward, in kernel launches. Assumed."""

HIDING_PART = 0.9
"""Fraction of a layer's compute that can hide the token exchange of another microbatch. Assumed."""

_CAPTURED_WITH = {"qkv_down": "qkv_linear", "dispatch": "expert_fc1"}
"""Segments without a tag, mapped to the tagged segment that CUDA graphs capture together with them."""


def make_layer_model(
    shape: LayerShape,
    hardware: Hardware,
    *,
    kind: str,
    efficiency: Efficiency = DEFAULT_EFFICIENCY,
    execution: Execution = DEFAULT_EXECUTION,
    graphs: Graphs = NO_CAPTURE,
) -> LayerModel:
    """Build the model of a layer: segment times, saved tensors and recompute units."""
    clock = Clock(hardware=hardware, efficiency=efficiency)
    works = list_layer_work(shape, execution)
    extras = count_extra_bytes(shape, execution)
    experts = shape.experts
    has_shared_overlap = experts is not None and experts.has_shared_overlap
    captured = find_captured(graphs.impl, graphs.modules, is_moe=experts is not None, has_shared_overlap=has_shared_overlap)
    launches = tuple(_count_launches(works, side, graphs, captured) for side in ("forward", "backward"))
    segments = clock.time_segments(works, extras, launches=launches)
    if experts is not None:
        segments = _replace(segments, "dispatch", host_wait=HostWait.KERNEL)  # the host synchronizes on the token counts
        if experts.has_shared_overlap:
            segments = _hide_shared_experts(segments, works, clock)
        if execution.has_expert_overlap:
            segments = _hide_exchange(segments, works, clock)
    tensors = list_saved_tensors(shape)
    units = make_units(shape, segments, tensors, copy_bytes_per_s=clock.memory_bytes_per_s)
    units = tuple(_lengthen(unit, segments, by=efficiency.rerun_extra) for unit in units)
    layer = LayerModel(kind=kind, segments=segments, tensors=tensors, units=units)
    return capture_layer(layer, graphs, has_shared_overlap=has_shared_overlap)


def _count_launches(works: Sequence[SegmentWork], side: str, graphs: Graphs, captured: frozenset[str]) -> list[int]:
    """Return each segment's launches in `side`, forward or backward. The first captured segment gets those of the graph."""
    counts = []
    for work in works:
        one: PassWork = getattr(work, side)
        if _CAPTURED_WITH.get(work.name, work.name) in captured:
            counts.append(0)
        elif work.name == "dispatch" and "moe_preprocess" in graphs.modules:
            counts.append(one.kernels - max(part.kernels for part in one.works))  # all except the permutation
        else:
            counts.append(one.kernels)
    if 0 in counts:
        counts[counts.index(0)] = GRAPH_LAUNCHES
    return counts


def _lengthen(unit: UnitModel, segments: Sequence[Segment], *, by: float) -> UnitModel:
    forward_s = sum(segment.forward_s for segment in segments if segment.name in unit.segments)
    return dataclasses.replace(unit, extra_s=unit.extra_s + by * unit.forward_part * forward_s)


def list_layer_work(shape: LayerShape, execution: Execution = DEFAULT_EXECUTION) -> tuple[SegmentWork, ...]:
    """Return the work of each segment of a layer, in forward order."""
    works = (*list_attention_work(shape, execution), *list_mlp_work(shape, execution))
    if not shape.has_mtp_projection:
        return works
    first, last = _make_mtp_works(shape, execution)
    return (first, *works, last)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Predicts how long work takes on a device."""

    hardware: Hardware
    efficiency: Efficiency = DEFAULT_EFFICIENCY

    @property
    def memory_bytes_per_s(self) -> float:
        """Return the bytes per second that memory-bound kernels read and write."""
        part = self.efficiency.memory or self.hardware.memory_efficiency or ASSUMED_MEMORY
        return get_rate(self.hardware, "device_memory_bytes_per_s", self.hardware.name) * part

    def time_segments(
        self, works: Sequence[SegmentWork], extras: Mapping[str, ExtraBytes], *, launches: Sequence[Sequence[int]] | None = None
    ) -> tuple[Segment, ...]:
        """Return the segments with their times. Forward and backward each take at least the host time of their launches."""
        passes = [work.forward for work in works], [work.backward for work in works]
        forward, backward = (
            self._time_passes(side, [one.kernels for one in side] if launches is None else launches[place])
            for place, side in enumerate(passes)
        )
        return tuple(
            Segment(
                name=work.name,
                forward_s=forward_s,
                backward_s=backward_s,
                forward_extra_bytes=extras[work.name].forward,
                backward_extra_bytes=extras[work.name].backward,
            )
            for work, forward_s, backward_s in zip(works, forward, backward, strict=True)
        )

    def time_work(self, work: Work) -> float:
        """Return the seconds of `work`: arithmetic or memory traffic, whichever is longer, plus the gaps between kernels."""
        rate = self.memory_bytes_per_s
        strided_rate = min(rate, self.efficiency.strided_bytes_per_s or rate)
        seconds = (work.moved_bytes - work.strided_bytes) / rate + work.strided_bytes / strided_rate
        if work.flop:
            is_fp8 = work.limit in (Limit.FP8_MATMUL, Limit.GROUPED_FP8_MATMUL)
            rate = get_rate(self.hardware, "fp8_flop_per_s" if is_fp8 else "bf16_flop_per_s", self.hardware.name)
            seconds = max(seconds, work.flop / (rate * self._find_part(work)))
        seconds = max(seconds, work.attention_rows * self.efficiency.attention_row_s)
        return seconds + work.sink_rows * self.efficiency.sink_row_s + work.kernels * self.efficiency.kernel_start_s

    def _find_part(self, work: Work) -> float:
        part: float = getattr(self.efficiency, work.limit.value) * self.hardware.compute_efficiency
        if work.expert_rows is not None:
            part *= work.expert_rows / (work.expert_rows + self.efficiency.grouped_rows)
        missing = max(0.0, 1 - work.head_channels / FULL_HEAD_CHANNELS) * 2  # 1 for heads of 64 channels
        return part * max(self.efficiency.narrow_attention, 1 - missing * (1 - self.efficiency.narrow_attention))

    def time_traffic(self, traffic: Traffic) -> float:
        """Return the seconds of the collectives in `traffic`. Traffic inside the NVLink domain overlaps traffic outside it."""
        rates = make_network_rates(self.hardware, self.efficiency)
        domain, network = rates.domain_ranks, rates.network_bytes_per_s
        part = self.efficiency.all_to_all if traffic.pattern is Pattern.ALL_TO_ALL else 1.0
        if traffic.span <= domain:
            seconds = traffic.sent_bytes / (rates.get_nvlink_rate(traffic.ranks) * part)
        elif traffic.pattern is Pattern.RING:
            seconds = traffic.sent_bytes / network
        else:
            # Number of the group's ranks that are in this rank's domain, including this rank.
            near = max(1, domain * traffic.ranks // traffic.span)
            each = traffic.sent_bytes / (traffic.ranks - 1)
            far_bytes = each * (traffic.ranks - near)
            if traffic.pattern is Pattern.NODES:
                # A token crosses the network once for each target node. Within the node it is copied over NVLink.
                nodes = round(traffic.ranks / near)
                far_bytes = each * traffic.ranks / traffic.copies * traffic.count_nodes(nodes) * (1 - 1 / nodes)
            seconds = max(each * (near - 1) / (rates.get_nvlink_rate(near) * part), far_bytes / (network * part))
        return seconds + traffic.calls * self.efficiency.collective_start_s

    def time_pass(self, one: PassWork) -> float:
        """Return the device seconds of a segment's forward or backward."""
        computing = sum(map(self.time_work, one.works))
        beside = sum(map(self.time_traffic, one.beside))
        return max(computing, beside) + sum(map(self.time_traffic, one.traffic))

    def _time_passes(self, passes: Sequence[PassWork], kernels: Sequence[int]) -> list[float]:
        times = [self.time_pass(one) for one in passes]
        # The host runs ahead between segments, so a layer is launch-bound as a whole or not at all. Each segment gets a share
        # of the delay in proportion to its launches.
        late_s = max(0.0, sum(kernels) * self.efficiency.host_s_per_launch - sum(times))
        return [time_s + late_s * count / sum(kernels) for time_s, count in zip(times, kernels, strict=True)]


def _time_exchange(works: Sequence[SegmentWork], clock: Clock) -> dict[str, tuple[float, float]]:
    return {
        work.name: (sum(map(clock.time_traffic, work.forward.traffic)), sum(map(clock.time_traffic, work.backward.traffic)))
        for work in works
        if work.name in ("dispatch", "moe_combine")
    }


def _hide_exchange(segments: Sequence[Segment], works: Sequence[SegmentWork], clock: Clock) -> tuple[Segment, ...]:
    """Subtract the part of the token exchange that the compute of another microbatch hides."""
    exchanges = _time_exchange(works, clock)
    exchange_s = sum(map(sum, exchanges.values()))
    compute_s = sum(one.forward_s + one.backward_s for one in segments) - exchange_s
    hidden = min(1.0, HIDING_PART * compute_s / exchange_s) if exchange_s else 0.0
    for name, (forward_s, backward_s) in exchanges.items():
        segments = _shorten(segments, name, hidden * forward_s, hidden * backward_s)
    return tuple(segments)


def _hide_shared_experts(segments: Sequence[Segment], works: Sequence[SegmentWork], clock: Clock) -> tuple[Segment, ...]:
    forward_s, backward_s = map(sum, zip(*_time_exchange(works, clock).values(), strict=True))
    return _shorten(segments, "shared_expert", forward_s, backward_s)


def _shorten(segments: Sequence[Segment], name: str, forward_s: float, backward_s: float) -> tuple[Segment, ...]:
    one = next(segment for segment in segments if segment.name == name)
    left_s = max(0.0, one.forward_s - forward_s), max(0.0, one.backward_s - backward_s)
    return _replace(segments, name, forward_s=left_s[0], backward_s=left_s[1])


def _replace(segments: Sequence[Segment], name: str, **fields: HostWait | float) -> tuple[Segment, ...]:
    return tuple(dataclasses.replace(one, **fields) if one.name == name else one for one in segments)  # type: ignore[arg-type]


def _make_mtp_works(shape: LayerShape, execution: Execution) -> tuple[SegmentWork, SegmentWork]:
    """Return the work of multi-token prediction around its layer: two norms and a projection before it, a norm after it."""
    sizes = LayerSizes(shape)
    linear = make_linear(shape, sizes.rows, 2 * shape.hidden_size, shape.hidden_size // shape.tensor_parallel_size)
    norms, sides = make_moves(4 * sizes.hidden, kernels=2), make_moves(4 * sizes.hidden)
    # The projection's output is sharded by channels. It is gathered, then scattered by tokens.
    gather = (*list_input_traffic(shape, 2 * shape.hidden_size)[0], *list_output_traffic(shape, shape.hidden_size)[0])
    first = SegmentWork(
        "mtp_projection",
        PassWork((norms, sides, *linear.list_forward()), traffic=gather),
        PassWork((*linear.list_backward(execution), sides, make_moves(6 * sizes.hidden, kernels=4)), traffic=gather),
    )
    last = SegmentWork(
        "mtp_norm", PassWork((make_moves(2 * sizes.hidden),)), PassWork((make_moves(3 * sizes.hidden, kernels=2),))
    )
    return first, last
