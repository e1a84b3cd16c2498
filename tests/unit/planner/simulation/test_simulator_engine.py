"""Compares the simulator with the engine: order, times and bytes of copies.

The engine runs on a device with a simulated clock per stream. Compute segments advance the clock by the seconds of a layer, and
copies by the seconds of a link. A wait for an event ends at the event's time. Autograd functions save tensors of any size.
"""

import contextlib
import dataclasses
import logging
import re
import unittest.mock
from random import Random

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rank_models import STATIC_BYTES, make_chunk, make_link, make_plan, make_rank

from fgoffload import Action, Site
from fgoffload.engine import ActivationLedger, CpuDevice, Lane, OffloadEngine
from fgoffload.planner.ranks.layer_model import HostWait, LayerModel, SavedTensor, Segment
from fgoffload.planner.ranks.rank_model import HostPace, Turn
from fgoffload.planner.ranks.schedule import PassKind, Pipeline, list_passes
from fgoffload.planner.simulation import chunk_compiler
from fgoffload.planner.simulation.simulation_result import StreamName
from fgoffload.planner.simulation.simulator import Detail, simulate_rank
from fgoffload.watched import Watched, find_watched

TAGS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "dispatch", "expert_fc1", "moe_act", "expert_fc2")
ENDS = {"attn_norm": "attn_proj", "mlp_norm": "expert_fc2", "moe_act": "expert_fc2"}
"""Tags whose group Megatron ends after a later segment."""


class ClockDevice(CpuDevice):
    """A CPU device with a clock for each stream. An event is the time of its stream when it was recorded.

    Whether an event is done depends on the position of the host, which is at compute or ahead of it.
    """

    has_blocking_copies = False

    def __init__(self, link, host_pace):
        super().__init__()
        self._host_pace = host_pace
        self._rates = {self.d2h_stream: link.d2h_bytes_per_s, self.h2d_stream: link.h2d_bytes_per_s}
        self._times = dict.fromkeys((*self._rates, self.current_stream()), 0.0)
        self.restart()

    def restart(self):
        """Begin a step without copies in flight."""
        self._begin_s = self._pass_start_s = self._host_s = max(self._times.values())
        self._times = dict.fromkeys(self._times, self._begin_s)
        self.busy_s = dict.fromkeys(self._rates, 0.0)

    @property
    def clock_s(self):
        """Compute time since the start of the step."""
        return self._times[self.current_stream()] - self._begin_s

    def compute(self, seconds):
        self._times[self.current_stream()] += seconds

    def record_event(self, stream, *, is_timed=False):
        return self._times[stream]

    def wait_event(self, stream, event, hazard):
        self._times[stream] = max(self._times[stream], event)

    def wait_stream(self, stream, other, hazard):
        self.wait_event(stream, self._times[other], hazard)

    def begin_pass(self):
        self._pass_start_s = self._times[self.current_stream()]

    def is_done(self, event):
        host_position_s = {
            HostPace.BESIDE: self._times[self.current_stream()],
            HostPace.LAYER_AHEAD: self._host_s,
            HostPace.PASS_AHEAD: self._pass_start_s,
            HostPace.STEP_AHEAD: -1.0,
        }
        return event <= max(host_position_s[self._host_pace], self._begin_s)

    def synchronize_host(self):
        """Make the host wait until compute has caught up."""
        self._host_s = self._times[self.current_stream()]

    def synchronize(self, event):
        self.wait_event(self.current_stream(), event, None)

    def is_equal(self, on_host, tensor, *, after):
        return True  # used only in the first steps, which are not simulated

    def copy_bytes(self, *, destination, source, stream):
        super().copy_bytes(destination=destination, source=source, stream=stream)
        seconds = source.numel() * source.element_size() / self._rates[stream]
        self._times[stream] += seconds
        self.busy_s[stream] += seconds


class SegmentOp(torch.autograd.Function):
    """An op that takes the seconds of a segment, saves tensors and returns its input."""

    @staticmethod
    def forward(ctx, device, segment, x, *tensors):
        device.compute(segment.forward_s)
        ctx.device, ctx.seconds = device, segment.backward_s
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        count = len(ctx.saved_tensors)
        ctx.device.compute(ctx.seconds)
        return (None, None, gradient, *[None] * count)


def make_layers(random):
    """Return layers with one saved tensor per segment, all of different sizes, and one that attention and projection share."""
    sizes = iter(random.sample(range(50, 500), 100))
    layers = []
    for _ in range(random.randrange(1, 5)):
        host_wait = random.choice((None, *HostWait))
        segments = tuple(
            Segment(
                name=tag,
                forward_s=float(random.randrange(4)),
                backward_s=float(random.randrange(4)),
                host_wait=host_wait if tag == "dispatch" else None,
            )
            for tag in TAGS
        )
        own = [SavedTensor(name=tag, tags=(tag,), size_bytes=next(sizes), element_bytes=1) for tag in TAGS if tag != "dispatch"]
        shared = SavedTensor(name="output", tags=("core_attn", "attn_proj"), size_bytes=next(sizes), element_bytes=1)
        layers.append(LayerModel(kind="any", segments=segments, tensors=(*own, shared)))
    return layers


def choose_tags(random, count):
    """Return the offloaded tags of each layer."""
    chosen = []
    for _ in range(count):
        part = random.choice((0.0, 0.3, 0.7))
        tags = [tag for tag in TAGS if tag != "dispatch" and random.random() < part]
        chosen.append([tag for tag in tags if tag != "attn_proj" or "core_attn" in tags])
    return chosen


class Training:
    """Runs the passes of a simulated step with the engine."""

    def __init__(self, engine, layers, chosen, *, turns, loss_window_bytes):
        self._turns = turns
        self._loss_window_bytes = loss_window_bytes
        self._engine = engine
        self._layers = layers
        self._chosen = chosen
        self._outputs = {}

    def run_pass(self, one):
        self._engine.device.begin_pass()
        if one.kind is PassKind.BACKWARD:
            output = self._outputs.pop(one.microbatch)
            output.backward(torch.ones_like(output))
            return
        lane = Lane(chunk=0, microbatch=one.microbatch)
        self._engine.begin_forward(lane)
        x = torch.ones(1, requires_grad=True) * 2
        for number, layer in enumerate(self._layers):
            self._engine.poll()
            watched = find_watched(self._chosen[number], shares_router_input=False)
            with contextlib.ExitStack() as watching:
                if watched is not Watched.LAYER:
                    self._engine.announce_backward(lane, x)
                if watched is not Watched.NOTHING:
                    watching.enter_context(self._engine.watch(lane))
                x = self._run_layer(lane, number, layer, x, watched, watching)
            self._engine.flush()
        if self._turns:
            self._engine.expect_backward(lane, window_bytes=self._loss_window_bytes)
        self._outputs[one.microbatch] = x

    def _run_layer(self, lane, number, layer, x, watched, watching):
        engine, open_ = self._engine, {}
        is_held = any(segment.host_wait is HostWait.HOLD for segment in layer.segments)
        output = torch.zeros(layer.tensors[-1].size_bytes, dtype=torch.uint8)
        for segment in layer.segments:
            tag = segment.name
            if segment.host_wait in (HostWait.HOLD, HostWait.COPY):
                engine.device.synchronize(engine.device.record_event(engine.device.d2h_stream))
            if segment.host_wait is not None:
                engine.device.synchronize_host()
            if tag == "dispatch":
                engine.flush()
                is_held = False
            tensors = [torch.zeros(one.size_bytes, dtype=torch.uint8) for one in layer.tensors if one.tags == (tag,)]
            if tag in ("core_attn", "attn_proj"):
                tensors.append(output)
            if tag == "attn_proj":
                del output
            saving = contextlib.nullcontext()
            if tag in self._chosen[number]:
                open_[tag] = engine.find_region(Site(chunk=0, layer=number, tag=tag), lane)
                open_[tag].enter(x)
                saving = open_[tag].saving()
            with saving:
                x = SegmentOp.apply(engine.device, segment, x, *tensors)
            del tensors
            if tag == "attn_proj" and watched is not Watched.LAYER:
                watching.close()
                engine.announce_backward(lane, x)
            # The segment's own group ends before the groups that contain it.
            for ended in sorted((one for one in open_ if ENDS.get(one, one) == tag), key=lambda one: one != tag):
                open_.pop(ended).end(is_held=is_held)
        return x


class LogCapture(logging.Handler):
    """Collects the engine's log lines."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logger = logging.getLogger("fgoffload.engine")
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)
        return self.lines

    def __exit__(self, *_):
        logger = logging.getLogger("fgoffload.engine")
        logger.removeHandler(self)
        logger.setLevel(logging.NOTSET)


def run_engine(device, rank, layers, chosen, *, loss_window_bytes):
    """Return the bytes of each offloaded group and each reloaded storage, the peak and the end time of the second step.

    In the first step the engine learns the order of passes.
    """
    engine = OffloadEngine(
        device=device, policy=rank.policy, min_offloaded_numel=rank.min_offloaded_numel, host_budget_bytes=1 << 20
    )
    ledger = ActivationLedger(parameters=())
    training = Training(engine, layers, chosen, turns=rank.turning_chunk is not None, loss_window_bytes=loss_window_bytes)
    for one in rank.passes:
        training.run_pass(one)
    device.restart()
    engine.finish_step()
    with LogCapture() as lines, engine.observe(ledger), ledger.watch():
        for one in rank.passes:
            training.run_pass(one)
    copies = [
        [int(size) for line in lines for size in re.findall(rf"^{act} .*: (?:\d+ storages, )?(\d+) B$", line)]
        for act in ("offload", "reload")
    ]
    end_s = device.clock_s
    engine.close()
    return copies, ledger.peak_bytes, end_s


def list_sizes(result, stream):
    """Return the bytes of each copy in a timeline, in order."""
    return [span.size_bytes for span in sorted(result.timeline.spans, key=lambda span: span.start_s) if span.stream is stream]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from((Pipeline(microbatches=2), Pipeline(stages=3, microbatches=4))),
    st.sampled_from((16.0, 128.0, 2.0**20)),
    st.sampled_from((16.0, 128.0, 2.0**20)),
    st.sampled_from((0, 300, 1000, 10**6)),
    st.sampled_from((0, 150, 600, 1500, 10**6)),
    st.sampled_from((0, 200)),
    st.sampled_from((None, 0)),
    st.sampled_from((None, 0, 200, 700)),
    st.sampled_from(HostPace),
)
# Groups that end after later ones; and a kept site that unpacks a tensor which another site offloaded.
@example(4338, Pipeline(microbatches=2), 16.0, 16.0, 0, 150, 0, None, None, HostPace.BESIDE)
@example(659, Pipeline(stages=3, microbatches=4), 16.0, 16.0, 1000, 10**6, 0, None, None, HostPace.BESIDE)
def test_the_simulator_matches_the_engine(seed, pipeline, d2h, h2d, window, prefetch, least, turning, loss_window, pace):
    random = Random(seed)
    layers = make_layers(random)
    chosen = choose_tags(random, len(layers))
    rank = make_rank(
        make_chunk(*layers),
        passes=list_passes(pipeline, rank=0),
        link=make_link(d2h=d2h, h2d=h2d, duplex=2.0**20),
        window_bytes=window,
        prefetch_bytes=prefetch,
        min_offloaded_numel=least,
        turning_chunk=turning,
        turn=Turn.CANCEL,
        host_pace=pace,
    )
    plan = make_plan({(number, tag): Action.OFFLOAD for number, tags in enumerate(chosen) for tag in tags})
    plan = dataclasses.replace(plan, loss_window_bytes=loss_window)
    # The clock device has no host overhead.
    with unittest.mock.patch.object(chunk_compiler, "HOST_LAYER_S", 0.0):
        result = simulate_rank(rank, plan, detail=Detail.TIMELINE)
    device = ClockDevice(rank.link, pace)
    (offloaded, reloaded), peak_bytes, end_s = run_engine(device, rank, layers, chosen, loss_window_bytes=loss_window)
    assert list_sizes(result, StreamName.D2H) == offloaded
    assert list_sizes(result, StreamName.H2D) == reloaded
    assert result.peak_bytes - STATIC_BYTES == peak_bytes
    assert result.step_s == end_s
    assert [result.d2h_s, result.h2d_s] == list(device.busy_s.values())
