"""What leaves is freed, by exactly its bytes, and everything comes back when the graph goes."""

import gc

import pytest
import torch
from support.sites import Sites, check_same_bits, make_engine

from fgoffload import Site, TransferPolicy
from fgoffload.engine import ActivationLedger, CpuDevice, DelayedCpuDevice, HostSlab, KeptReason

NBYTES = 128 * 128 * 4


@pytest.fixture(autouse=True)
def _without_the_cyclic_collector():
    # Nothing may wait for Python's collector: on a device that is how memory runs out.
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def weight(seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(128, 128, generator=torch.Generator().manual_seed(seed)) / 16)


def run_layers(sites: Sites, weights: list[torch.nn.Parameter], tags: list[str]) -> torch.Tensor:
    """Each layer keeps its input for the product, and the product for the sine."""
    h = torch.ones(128, 128)
    for w, tag in zip(weights, tags, strict=True):
        h = sites(lambda h, w=w: (h @ w).sin(), h, tag=tag)
    return h


def get_resident_bytes(ledger: ActivationLedger) -> int:
    ledger.sample()
    return ledger.samples[-1].resident_bytes


def test_resident_bytes_after_forward_fall_by_exactly_what_the_tags_save():
    weights = [weight(seed) for seed in range(4)]
    resident = []
    for tags in (None, ["a", "b", "a", "b"]):
        engine = make_engine() if tags else None
        ledger = ActivationLedger(parameters=weights)
        with ledger.watch():
            if engine:
                with engine.observe(ledger):
                    output = run_layers(Sites(engine), weights, tags)
            else:
                output = run_layers(Sites(None), weights, ["a"] * 4)
        resident.append(get_resident_bytes(ledger))
        if engine:
            moved = engine.finish_step().d2h_bytes
            output.sum().backward()
            del output
            engine.close()
        else:
            del output
    # Four inputs and four products. A product is saved by the sine; the last sine is the output, which nobody saved.
    assert resident[0] == 8 * NBYTES
    assert moved == 8 * NBYTES
    assert resident[1] == 0


def test_where_copies_block_the_last_group_of_a_forward_is_gone_when_it_ends():
    w = weight()
    engine = make_engine(policy=TransferPolicy(window_bytes=1 << 30))
    ledger = ActivationLedger(parameters=[w])
    with engine.observe(ledger):
        output = run_layers(Sites(engine), [w] * 3, ["a"] * 3)
    assert get_resident_bytes(ledger) == 0
    del output
    engine.close()


def test_nothing_is_left_on_device_or_host_after_backward():
    weights = [weight(seed) for seed in range(4)]
    engine = make_engine()
    ledger = ActivationLedger(parameters=weights)
    with engine.observe(ledger), ledger.watch():
        run_layers(Sites(engine), weights, ["a"] * 4).sum().backward()
    assert get_resident_bytes(ledger) == 0
    assert engine.arena.used_bytes == 0
    engine.close()


def test_device_bytes_in_backward_stay_within_prefetch_and_one_group():
    weights = [weight(seed) for seed in range(8)]
    engine = make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=2 * NBYTES))
    ledger = ActivationLedger(parameters=weights)
    with engine.observe(ledger), ledger.watch():
        output = run_layers(Sites(engine), weights, ["a"] * 8).sum()
        before = len(ledger.samples)
        output.backward()
    peak = max(sample.resident_bytes for sample in ledger.samples[before:])
    assert NBYTES < peak <= 4 * NBYTES  # the group in use (2), and the one ahead of it (2)
    engine.close()


@pytest.mark.parametrize("has_backward", [True, False])
def test_a_graph_that_is_dropped_gives_everything_back(has_backward):
    weights = [weight(seed) for seed in range(3)]
    engine = make_engine(DelayedCpuDevice())
    for _ in range(3):
        output = run_layers(Sites(engine), weights, ["a"] * 3)
        if has_backward:
            output.sum().backward()
        del output
        assert engine.arena.used_bytes == 0
    engine.close()


def test_memory_is_flat_over_a_hundred_steps_without_the_collector():
    weights = [weight(seed) for seed in range(2)]
    engine = make_engine()
    counts = []
    for step in range(100):
        run_layers(Sites(engine), weights, ["a"] * 2).sum().backward()
        if step in (10, 99):
            counts.append((len(gc.get_objects()), engine.arena.reserved_bytes))
    assert counts[1][0] - counts[0][0] < 50  # the list above itself, and what the interpreter caches
    assert counts[0][1] == counts[1][1]
    engine.close()


def test_a_tensor_that_the_user_still_holds_is_counted_as_held_elsewhere():
    w = weight()
    engine = make_engine()
    h = torch.ones(128, 128) * 2
    sites = Sites(engine)
    sites(lambda h: (h @ w).sin(), h).sum().backward()
    stats = engine.finish_step()
    assert stats.tags["core_attn"].held_elsewhere_bytes == NBYTES  # h, and not the product
    engine.close()


def test_what_is_below_the_minimum_size_stays_and_is_counted():
    w = weight()
    engine = make_engine(min_offloaded_numel=128 * 128 + 1)
    sites = Sites(engine)
    sites(lambda h: (h @ w).sin(), torch.ones(128, 128) * 2).sum().backward()
    stats = engine.finish_step().tags["core_attn"]
    assert stats.d2h_bytes == 0
    assert stats.kept_bytes == {KeptReason.TOO_SMALL.value: 2 * NBYTES}
    engine.close()


def test_beyond_the_host_budget_tensors_stay_and_bits_are_the_same():
    weights = [weight(seed) for seed in range(4)]
    engine = make_engine(host_budget_bytes=3 * NBYTES)
    check_same_bits(lambda sites: run_layers(sites, weights, ["a"] * 4), weights, engine)
    stats = engine.finish_step()
    assert stats.d2h_bytes == 3 * NBYTES
    assert stats.tags["a"].kept_bytes == {KeptReason.HOST_BUDGET.value: 5 * NBYTES}
    assert engine.arena.reserved_bytes == 3 * NBYTES
    engine.close()


def test_tensors_marked_to_stay_and_parameters_never_move():
    w = weight()
    engine = make_engine()
    kept = (torch.ones(128, 128) * 3).requires_grad_()
    h = kept * 2
    engine.keep([h])
    Sites(engine)(lambda h: h @ w.t(), h[:]).sum().backward()  # saves the marked storage, and a view of the parameter
    stats = engine.finish_step().tags["core_attn"]
    assert stats.saved_tensors == 2
    assert stats.d2h_bytes == 0
    assert stats.kept_bytes == {KeptReason.MARKED.value: NBYTES}
    engine.close()


def test_tensors_of_another_device_stay():
    class Elsewhere(CpuDevice):
        type = "elsewhere"

    engine = make_engine(Elsewhere())
    Sites(engine)(lambda h: h.sin(), torch.ones(128, 128, requires_grad=True) * 2).sum().backward()
    stats = engine.finish_step().tags["core_attn"]
    assert stats.d2h_bytes == 0
    assert stats.kept_bytes == {KeptReason.OTHER_DEVICE.value: NBYTES}
    engine.close()


def test_an_empty_slice_does_not_hold_the_storage_that_it_lies_in():
    engine = make_engine()
    x = torch.ones(128, 128, requires_grad=True)
    ledger = ActivationLedger(parameters=[x])
    with engine.observe(ledger), ledger.watch():
        output = Sites(engine)(lambda h: torch.cat([h[:0].sin(), h.sin()]), x * 2)
    assert get_resident_bytes(ledger) == 0
    output.sum().backward()
    engine.close()


class SineByExpert(torch.autograd.Function):
    """Saves a view of its input for each expert, as grouped linears do; the second expert has no tokens."""

    @staticmethod
    def forward(ctx, tokens):
        ctx.save_for_backward(*tokens.reshape(-1, 128).split([128, 0]))
        return tokens.sin()

    @staticmethod
    def backward(ctx, gradient):
        return torch.cat([part.cos() for part in ctx.saved_tensors]) * gradient


def test_an_expert_without_tokens_does_not_hold_those_of_the_others():
    engine = make_engine()
    x = torch.ones(128, 128, requires_grad=True)
    ledger = ActivationLedger(parameters=[x])
    with engine.observe(ledger), ledger.watch():
        output = Sites(engine)(SineByExpert.apply, x * 2)
    assert get_resident_bytes(ledger) == 0
    output.sum().backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)
    engine.close()


def test_the_window_bounds_the_bytes_in_flight_and_counts_the_waits():
    weights = [weight(seed) for seed in range(4)]
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=2 * NBYTES, prefetch_bytes=0))
    output = run_layers(Sites(engine), weights, ["a"] * 4)
    assert (
        engine._transfers.in_flight_bytes == 2 * NBYTES
    )  # each group is two storages; the delayed device finishes none itself
    assert engine.finish_step().window_waits == 3
    output.sum().backward()
    engine.close()


def test_something_is_copied_out_until_its_copies_are_done():
    device = DelayedCpuDevice()
    engine = make_engine(device, policy=TransferPolicy(window_bytes=8 * NBYTES, prefetch_bytes=0))
    assert not engine.is_copying_out()
    output = run_layers(Sites(engine), [weight()], ["a"])
    assert engine.is_copying_out()
    device.synchronize(device.record_event(device.d2h_stream))
    assert not engine.is_copying_out()
    output.sum().backward()
    engine.close()


def test_closing_while_a_graph_wants_its_tensors_back_loses_nothing(caplog):
    w = weight()
    engine = make_engine()
    Sites(None)(lambda h: (h @ w).sin(), torch.ones(128, 128) * 2).sum().backward()
    expected, w.grad = w.grad, None
    output = Sites(engine)(lambda h: (h @ w).sin(), torch.ones(128, 128) * 2)
    engine.close()
    assert "still wants 128.00 KiB back" in caplog.text
    assert engine.arena.reserved_bytes > 0
    output.sum().backward()
    assert torch.equal(w.grad, expected)
    del output
    engine.close()
    assert engine.arena.reserved_bytes == 0


def test_host_memory_goes_with_graph_and_engine_even_if_nobody_closes():
    freed = []

    class Counting(CpuDevice):
        def allocate_host(self, size_bytes: int) -> HostSlab:
            return HostSlab(torch.empty(size_bytes, dtype=torch.uint8), free=lambda: freed.append(size_bytes))

    engine = make_engine(Counting(), host_budget_bytes=1 << 20)
    output = Sites(engine)(lambda h: h.sin(), torch.ones(128, 128, requires_grad=True) * 2)
    del engine
    assert freed == []
    output.sum().backward()
    del output
    assert freed == [1 << 20]


def test_a_kept_graph_gives_device_memory_back_between_two_backwards():
    weights = [weight(seed) for seed in range(4)]
    engine = make_engine(policy=TransferPolicy(prefetch_bytes=0))
    ledger = ActivationLedger(parameters=weights)
    with engine.observe(ledger), ledger.watch():
        output = run_layers(Sites(engine), weights, ["a"] * 4).sum()
        output.backward(retain_graph=True)
    # Of four groups the two that backward came to last: one is dropped when backward leaves the next, and the first layer's
    # input has no gradient by which backward could be seen to leave it.
    assert get_resident_bytes(ledger) == 4 * NBYTES
    output.backward()
    del output
    engine.close()


def test_what_backward_wants_before_its_copy_is_done_stays_and_does_not_come_back():
    weights = [weight(seed) for seed in range(4)]
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=1 << 30, prefetch_bytes=2 * NBYTES))
    check_same_bits(lambda sites: run_layers(sites, weights, ["a"] * 4), weights, engine)
    stats = engine.finish_step().tags["a"]
    assert stats.recalled_bytes == stats.d2h_bytes == 8 * NBYTES
    assert stats.h2d_bytes == 0
    engine.close()


def test_bytes_that_left_came_back_or_were_recalled():
    weights = [weight(seed) for seed in range(6)]
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=3 * NBYTES, prefetch_bytes=2 * NBYTES))
    check_same_bits(lambda sites: run_layers(sites, weights, ["a"] * 6), weights, engine)
    stats = engine.finish_step().tags["a"]
    assert stats.recalled_bytes > 0
    assert stats.h2d_bytes > 0
    assert stats.d2h_bytes == stats.h2d_bytes + stats.recalled_bytes == 12 * NBYTES
    engine.close()


def test_looking_for_what_to_bring_back_costs_no_more_where_nothing_left():
    # 400 groups that all stay: each mark of backward must not look at all of them again.
    looks = []

    class CountingList(list):
        def __getitem__(self, index):
            looks.append(index)
            return super().__getitem__(index)

    engine = make_engine(min_offloaded_numel=1 << 30)
    sites = Sites(engine)
    sites.lane.groups = CountingList()
    h = torch.ones(4, 4, requires_grad=True)
    for _ in range(400):
        h = sites(lambda h: h.sin(), h)
    h.sum().backward()
    assert len(looks) < 400 * 8
    engine.close()


@pytest.mark.parametrize("has_end_marks", [True, False], ids=["marks", "no marks"])
def test_every_backward_of_a_kept_graph_prefetches_and_gives_device_memory_back(has_end_marks):
    weights = [weight(seed) for seed in range(6)]
    engine = make_engine(policy=TransferPolicy(prefetch_bytes=2 * NBYTES))
    output = run_layers(Sites(engine, has_end_marks=has_end_marks), weights, ["a"] * 6).sum()
    engine.finish_step()
    ledger = ActivationLedger(parameters=weights)
    with engine.observe(ledger):
        seen = []
        for _ in range(3):
            output.backward(retain_graph=True)
            seen.append((get_resident_bytes(ledger), engine.finish_step().prefetch_misses))
    assert seen == [(4 * NBYTES, 2)] * 3
    del output
    engine.close()


def test_a_storage_that_many_groups_save_comes_back_once():
    x = torch.ones(128, 128, requires_grad=True)

    def forward(sites: Sites) -> torch.Tensor:
        mask = (x.detach() * 0.5).contiguous()
        h = x * 2
        for _ in range(6):
            h = sites(lambda h: h * mask, h)
        return h

    engine = check_same_bits(forward, [x])
    stats = engine.finish_step().tags["core_attn"]
    assert stats.d2h_bytes == stats.h2d_bytes == NBYTES
    engine.close()


def test_a_storage_that_many_groups_save_counts_once_for_prefetch():
    mask = (torch.ones(128, 128) * 0.5).contiguous()
    engine = make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=4 * NBYTES))
    sites = Sites(engine)
    h = torch.ones(128, 128, requires_grad=True) * 2
    for _ in range(3):
        h = sites(lambda h: h.sin() * mask, h)
    h = sites(torch.sin, h)
    engine.approach_backward(sites.lane, sites.lane.groups[-1])
    # The last group's storage, and ahead of backward those of three groups, and the mask.
    assert engine.finish_step().h2d_bytes == (1 + 3 + 1) * NBYTES
    assert (sites.lane.away, sites.lane.ahead_bytes) == (0, 4 * NBYTES)
    del h
    engine.close()


def test_a_group_around_another_no_longer_counts_as_ahead_when_backward_takes_from_it():
    engine = make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=3 * NBYTES))
    sites = Sites(engine)
    h = sites(torch.sin, torch.ones(128, 128, requires_grad=True) * 2, tag="attn_proj")
    around = engine.find_region(Site(chunk=0, layer=9, tag="mlp_norm"), sites.lane)
    around.enter(h)
    with around.saving():
        h = h.sin().cos()
    h = sites(torch.sin, h, tag="expert_fc1")
    around.end()
    # Backward is behind all groups: the last two fit, and the first does not beside them.
    engine.pass_backward(sites.lane)
    assert (sites.lane.away, sites.lane.ahead_bytes) == (1, 3 * NBYTES)
    h.sum().backward()
    tags = engine.finish_step().tags
    assert {tag: tags[tag].prefetch_misses for tag in tags} == {"attn_proj": 0, "mlp_norm": 0, "expert_fc1": 0}
    engine.close()


def test_gathered_groups_count_what_moves_for_prefetch():
    w = weight()

    def forward(sites: Sites) -> torch.Tensor:
        h = w * 2
        for _ in range(4):
            h = sites(lambda h: h[:, ::16].sin().repeat(1, 16), h)
        return h

    engine = make_engine(policy=TransferPolicy(prefetch_bytes=NBYTES // 4))
    check_same_bits(forward, [w], engine)
    stats = engine.finish_step()
    assert stats.d2h_bytes == 4 * NBYTES // 16
    assert stats.prefetch_misses == 1
    engine.close()


def test_what_something_else_held_does_not_leave_again():
    held = torch.ones(128, 128) * 2  # a table that all layers use
    x = torch.ones(128, 128, requires_grad=True)
    engine = make_engine()
    moved = []
    for _ in range(3):
        Sites(engine)(lambda h: h * held, x * 2).sum().backward()
        moved.append(engine.finish_step().tags["core_attn"].d2h_bytes)
    assert moved == [NBYTES, 0, 0]
    engine.close()


def test_marking_many_tensors_to_stay_costs_the_same_for_each():
    engine = make_engine()
    sizes = []
    for _ in range(5):
        tensors = [torch.ones(1) for _ in range(1000)]
        for tensor in tensors:
            engine.keep([tensor])
        sizes.append(len(engine._staying._reasons))
    assert max(sizes) <= 4096  # those that died are forgotten now and then, and not at each call
    engine.close()


def test_bytes_come_back_at_the_alignment_that_they_left_with():
    engine = make_engine()
    x = torch.randn(4096, requires_grad=True)
    h = x * 2
    output = Sites(engine)(lambda h: h[300:3000].sin(), h)  # 1200 bytes into the storage: 176 behind a multiple of 512
    saved = output.grad_fn._saved_self
    assert (saved.data_ptr() - saved.untyped_storage().data_ptr()) % 512 == 1200 % 512
    assert torch.equal(saved, h[300:3000])
    del output, saved
    engine.close()


def test_what_was_called_back_stays_although_its_copy_finishes_before_it_is_taken():
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=1 << 30, prefetch_bytes=0))
    sites = Sites(engine)
    output = sites(lambda h: h.sin(), torch.ones(128, 128, requires_grad=True) * 2)
    engine.approach_backward(sites.lane, sites.lane.groups[-1])
    engine.close()  # finishes all copies
    output.sum().backward()
    stats = engine.finish_step()
    assert stats.tags["core_attn"].recalled_bytes == NBYTES
    assert stats.h2d_bytes == stats.prefetch_misses == 0
    engine.close()


@pytest.mark.parametrize("min_offloaded_numel", [0, 1 << 20])
def test_a_saved_output_does_not_hold_the_graph_that_made_it(min_offloaded_numel):
    engine = make_engine(DelayedCpuDevice(), min_offloaded_numel=min_offloaded_numel)
    x = torch.ones(128, 128, requires_grad=True)
    ledger = ActivationLedger(parameters=[x])
    with engine.observe(ledger), ledger.watch():
        output = Sites(engine)(lambda h: h.exp(), x * 2)  # saves what it returns
    assert get_resident_bytes(ledger) == NBYTES
    del output
    engine.close()
    assert get_resident_bytes(ledger) == 0


def test_a_group_that_ends_after_others_does_not_count_them_as_left():
    x = torch.ones(128, 128, requires_grad=True)

    def forward(sites: Sites) -> torch.Tensor:
        h = x * 2
        for layer in range(3):
            if sites.engine is None:
                h = h.sin().cos() + h
                continue
            norm = sites.engine.find_region(Site(chunk=0, layer=layer, tag="mlp_norm"), sites.lane)
            norm.enter(h)
            with norm.saving():
                normed = h.sin()
            h = sites(lambda h: h.cos(), normed, tag="expert_fc1") + h
            norm.end(h)  # after the residual was added, and with it after the experts
        return h

    engine = check_same_bits(forward, [x], make_engine(policy=TransferPolicy(prefetch_bytes=1 << 30)))
    assert engine.finish_step().prefetch_misses == 0
    engine.close()


@pytest.mark.parametrize(("keeps_all", "place"), [(True, "layers.3.a mb=2"), (False, "backward of layers.3.a mb=2")])
def test_the_ledger_says_where_in_the_step_the_peak_is(keeps_all, place):
    weights = [weight(seed) for seed in range(3)]
    engine = make_engine(min_offloaded_numel=(1 << 30) if keeps_all else 0, policy=TransferPolicy(prefetch_bytes=1 << 30))
    ledger = ActivationLedger(parameters=weights)
    with engine.observe(ledger), ledger.watch():
        output = run_layers(Sites(engine, microbatch=2), weights, ["a"] * 3).sum()
        output.backward()
    peak = ledger.find_peak()
    # Where all stays, forward's end; where all leaves, and comes back at once, what backward takes first.
    assert (peak.resident_bytes, peak.place) == (ledger.peak_bytes, place)
    engine.close()
