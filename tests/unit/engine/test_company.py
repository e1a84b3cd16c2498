"""Other features of torch beside regions: what a region cannot serve it leaves alone, and what it serves is right."""

import gc
import warnings

import pytest
import torch
from support.sites import Sites, check_same_bits, get_gradients, make_engine
from support.tensors import assert_same_bits, leaf
from support.ticking import D2H_S, H2D_S, WAIT_S, TickingCpuDevice

from fgoffload import Site, StateError, TransferPolicy
from fgoffload.engine import CpuDevice, DelayedCpuDevice, KeptReason, Lane, TimeKind

NBYTES = 64 * 64 * 4


def sine_in_a_region(sites: Sites, x: torch.Tensor) -> torch.Tensor:
    with sites.watched():
        return sites(torch.sin, x * 2)


def test_torch_func_grad_around_regions_works_and_moves_nothing():
    engine = make_engine()
    found = torch.func.grad(lambda v: sine_in_a_region(Sites(engine), v).sum())(torch.ones(64, 64))
    assert torch.equal(found, torch.func.grad(lambda v: sine_in_a_region(Sites(None), v).sum())(torch.ones(64, 64)))
    assert engine.finish_step().tags == {}


def test_where_hooks_are_forbidden_regions_do_nothing():
    engine = make_engine()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        check_same_bits(lambda sites: sine_in_a_region(sites, x), [x := leaf(64, 64)], engine)
    assert engine.finish_step().tags == {}


def test_while_torch_jit_traces_regions_do_nothing():
    engine, x = make_engine(), leaf(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.trace(lambda x: sine_in_a_region(Sites(engine), x), x, check_trace=False)
    assert engine.finish_step().tags == {}


@pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice])
def test_a_default_device_of_the_user_does_not_say_where_host_memory_lies(make_device):
    engine = make_engine(make_device())
    x, w = leaf(64, 64), leaf(64, 64, seed=1)
    expected = get_gradients(lambda sites: sine_in_a_region(sites, x @ w), [x, w], Sites(None))
    x.grad = w.grad = None
    seed = torch.randn(64, 64, generator=torch.Generator().manual_seed(7), dtype=torch.float64).float()
    with torch.device("meta"):
        output = sine_in_a_region(Sites(engine), x @ w)
        assert output.grad_fn._saved_self.device.type == "cpu"
        output.backward(seed)
    assert_same_bits(expected, [x.grad, w.grad])
    assert engine.finish_step().d2h_bytes == NBYTES


def test_a_tensor_of_inference_mode_can_be_moved_by_hand_and_taken_back_there():
    engine, lane = make_engine(), Lane(chunk=0, microbatch=0)
    with torch.inference_mode():
        tensor = torch.randn(64, 64)
        group = engine.open_group(Site(chunk=0, layer=0, tag="by_hand"), lane)
        handle = engine.save(tensor, lane=lane, group=group)
        engine.end(lane, group)
        assert torch.equal(handle.take(), tensor)
    assert engine.finish_step().d2h_bytes == NBYTES


def test_chunks_that_count_their_changes_apart_are_not_served_from_what_lay_between_others():
    x, w = leaf(64, 16), leaf(16, 64, seed=1)

    def forward(sites: Sites) -> torch.Tensor:
        a, b, c, d = (x @ w).unsafe_chunk(4, dim=1)  # as the gates of an LSTM cell, each changed in place
        a, c, d = sites(lambda a, c, d: (a.sigmoid_(), c.sigmoid_(), d.sigmoid_()), a, c, d, output=lambda results: results[0])
        b = sites(torch.tanh_, b)  # its bytes have left with the others, and were not these
        return a * c + b * d

    check_same_bits(forward, [x, w]).close()


@pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice])
def test_running_statistics_that_change_without_a_count_are_those_of_their_own_forward(make_device):
    def run(engine) -> list[torch.Tensor]:
        norm, x = torch.nn.BatchNorm1d(64).eval(), leaf(32, 64)
        older = Sites(engine)(norm, x * 2)  # kept, as a target may be
        norm.train()
        with torch.no_grad():
            norm(3 * x + 1)
        norm.eval()
        Sites(engine)(norm, x * 2).square().sum().backward()
        return [x.grad, older.detach()]

    engine = make_engine(make_device())
    assert_same_bits(run(None), run(engine))
    assert KeptReason.HELD.value in engine.finish_step().tags["core_attn"].kept_bytes


def test_forwards_that_only_watch_leave_no_notes_behind():
    engine, x = make_engine(), leaf(64, 64)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for step in range(200):
            with Sites(engine).watched():
                (x * 2).sin().cos().sum().backward()
            if step in (20, 199):
                counts.append(len(gc.get_objects()))
    finally:
        gc.enable()
    assert counts[1] - counts[0] < 20


def test_forwards_over_one_leaf_leave_no_marks_on_it_and_bring_nothing_back_twice():
    engine, prompt = make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=1 << 30)), leaf(64, 64)
    outputs = []
    for microbatch in range(4):
        sites = Sites(engine, microbatch=microbatch, has_end_marks=True)
        h = sites(lambda h: h.exp(), prompt)
        outputs.append(sites(lambda h: h.sin(), sites(lambda h: h.tanh(), h)).sum())
    assert not prompt._backward_hooks
    for output in reversed(outputs):
        output.backward()
    stats = engine.finish_step()
    assert stats.h2d_bytes <= stats.d2h_bytes


def test_capture_of_a_graph_is_refused():
    class CapturingDevice(CpuDevice):
        def is_capturing(self) -> bool:
            return True

    engine = make_engine(CapturingDevice())
    with pytest.raises(StateError, match="CUDA graph is being captured"):
        engine.find_region(Site(chunk=0, layer=0, tag="core_attn"), Lane(chunk=0, microbatch=0))
    with pytest.raises(StateError, match="CUDA graph is being captured"):
        engine.watch(Lane(chunk=0, microbatch=0))


def test_times_are_those_between_the_events_around_copies_and_waits():
    engine = make_engine(device := TickingCpuDevice(), is_timed=True)
    tags = {"core_attn": 1, "moe_act": 3}

    def compute(h: torch.Tensor) -> torch.Tensor:
        device.now_s += 1000.0
        return h.sin()

    def run(sites: Sites) -> torch.Tensor:
        h = x * 2
        for tag, count in tags.items():
            for _ in range(count):
                h = sites(compute, h, tag=tag)
        return h

    check_same_bits(run, [x := leaf(64, 64)], engine)
    found = engine.finish_step().tags
    # A window of no bytes: compute waits for each copy to the host, and again for each one back.
    for tag, count in tags.items():
        wait_s = sum(WAIT_S.values())
        assert found[tag].seconds == {TimeKind.D2H: D2H_S * count, TimeKind.H2D: H2D_S * count, TimeKind.WAIT: wait_s * count}
    engine.close()


def test_times_are_measured_where_they_are_asked_for_and_nowhere_else():
    for is_timed in (True, False):
        engine = make_engine(is_timed=is_timed)
        check_same_bits(lambda sites: sites(torch.sin, x * 2), [x := leaf(64, 64)], engine)
        seconds = engine.finish_step().tags["core_attn"].seconds
        assert set(seconds) == (set(TimeKind) if is_timed else set())
        assert all(value >= 0 for value in seconds.values())
        engine.close()
