"""Tests minimal examples of faults found in other activation offload engines.

They are listed in `docs/concepts/faults.md`, in the same order.
"""

import pytest
import torch
from support.clocks import ClockedCpuDevice
from support.sites import DelayedCpuDevice, Sites, check_same_bits, get_gradients, has_hooks, make_engine
from support.tensors import assert_same_bits, leaf, without_the_cyclic_collector
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fgoffload import Action, IntegrationError, OffloadConfig, OffloadPlan, Site, StateError, TransferPolicy
from fgoffload.engine import ActivationLedger, CpuDevice, KeptReason, OffloadEngine
from fgoffload.integrations import megatron
from fgoffload.integrations.megatron.patching.imports import load_module

pytestmark = pytest.mark.quick

DEVICES = pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])
NBYTES = 64 * 64 * 4


def run_layers(sites: Sites, h: torch.Tensor, count: int = 4) -> torch.Tensor:
    """Each layer saves one storage of `NBYTES`."""
    for _ in range(count):
        h = sites(torch.sin, h)
    return h


def count_offloaded_bytes(engine: OffloadEngine) -> int:
    return engine.finish_step().d2h_bytes


@pytest.mark.parametrize("window_bytes", [0, 1 << 30])
@pytest.mark.parametrize("columns", [slice(None), slice(0, 64, 16)], ids=["contiguous", "gathered"])
def test_fault_01_a_reload_waits_for_its_own_copy_to_the_host(columns, window_bytes):
    x = leaf(64, 64)
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=window_bytes, prefetch_bytes=0))
    # The first step of a new engine, whose host memory contains NaN until a copy to it has run.
    check_same_bits(lambda sites: sites(lambda h: h[:, columns].sin(), x * 2), [x], engine)
    assert count_offloaded_bytes(engine) == 64 * 4 * len(range(64)[columns])
    engine.close()


def test_fault_02_a_host_block_is_not_written_while_a_queued_copy_reads_it():
    device = ClockedCpuDevice()
    engine = make_engine(device, host_budget_bytes=NBYTES, policy=TransferPolicy(window_bytes=0, prefetch_bytes=0))
    sites = Sites(engine)
    output = sites(torch.sin, leaf(64, 64) * 2)
    engine.approach_backward(sites.lane, sites.lane.groups[0])
    del output  # releases the block before any wait for the copy that reads it
    with device.on("side"):  # main waits for that copy before the buffer's memory is reused
        again = Sites(engine)(torch.sin, leaf(64, 64) * 2)
    (read,), (_, write) = device.find_copies(device.h2d_stream), device.find_copies(device.d2h_stream)
    assert read.is_before(write)
    assert engine.arena.reserved_bytes == NBYTES  # so it was the same block
    del again
    engine.close()


ALIASES = {
    "product with its transpose": lambda h: h @ h.t(),
    "transpose times itself": lambda h: h.t() @ h,
    "expanded row": lambda h: h[:1].expand(64, 64) * h,
    "prefix": lambda h: h[:5].sin().sum() * h.sin(),
    "reinterpreted": lambda h: h.view(torch.int32).ne(0) * h.sin(),
}


@DEVICES
@pytest.mark.parametrize("name", ALIASES)
def test_fault_03_tensors_at_the_same_address_stay_distinct(name, make_device):
    x = leaf(64, 64)
    engine = check_same_bits(lambda sites: sites(ALIASES[name], x * 2), [x], make_engine(make_device()))
    assert count_offloaded_bytes(engine) > 0
    engine.close()


def test_fault_04_a_storage_that_is_saved_twice_is_copied_once():
    x = leaf(64, 64)
    engine = check_same_bits(lambda sites: sites(lambda h: h.sin() + h.cos() + h.detach().exp() * h, x * 2), [x])
    # `h`, which three ops save, and the exponential, which the product saves.
    assert count_offloaded_bytes(engine) == 2 * NBYTES
    engine.close()


@DEVICES
def test_fault_05_a_view_is_rebuilt_at_its_offset(make_device):
    x = leaf(64, 64)
    engine = make_engine(make_device())
    check_same_bits(lambda sites: sites(lambda h: h[60:, 3:].sin() + h[60:, :-3].cos(), x * 2), [x], engine)
    start_bytes = 60 * 64 * 4  # a multiple of 512; the last rows are at the end of the storage
    assert count_offloaded_bytes(engine) == NBYTES - start_bytes
    engine.close()


def test_fault_06_a_forward_without_grad_before_training_does_not_count_as_a_step():
    x = leaf(64, 64)
    engine = make_engine()
    for _ in range(2):
        with torch.no_grad():
            run_layers(Sites(engine), x * 2)
        assert engine.finish_step().tags == {}
        check_same_bits(lambda sites: run_layers(sites, x * 2), [x], engine)
        assert count_offloaded_bytes(engine) == 4 * NBYTES
    engine.close()


def test_fault_07_a_step_with_more_microbatches_than_the_last_is_fully_offloaded():
    x = leaf(64, 64)
    engine = make_engine()
    for count in (2, 4, 3):
        outputs = [run_layers(Sites(engine, microbatch=index), x * 2) for index in range(count)]
        assert count_offloaded_bytes(engine) == count * 4 * NBYTES
        for output in outputs:
            output.sum().backward()
    engine.close()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("is_inside", [True, False])
def test_fault_08_a_module_both_recomputed_and_offloaded_is_bitwise_identical(is_inside, use_reentrant):
    x = leaf(64, 64)

    def recompute(function, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, h, use_reentrant=use_reentrant)

    def forward(sites: Sites) -> torch.Tensor:
        if is_inside:
            return sites(lambda h: recompute(lambda h: h.softmax(-1).exp(), h), x * 2)
        return recompute(lambda h: sites(lambda h: h.softmax(-1).exp(), h), x * 2)

    engine = check_same_bits(forward, [x])
    assert count_offloaded_bytes(engine) == (NBYTES if is_inside else 0)  # the input of the checkpoint
    engine.close()


@pytest.mark.parametrize(("fraction", "offloaded"), [(1.0, 10), (0.9, 9), (0.8, 8), (0.5, 5), (0.1, 1), (0.0, 0)])
def test_fault_09_a_fraction_of_ten_groups_offloads_exactly_that_many(fraction, offloaded):
    sites = [Site(chunk=0, layer=layer, tag="core_attn") for layer in range(10)]
    actions = OffloadPlan.from_fraction(sites, fraction).actions
    assert [site.layer for site in sites if actions[site] is Action.OFFLOAD] == list(range(offloaded))


def test_fault_10_backward_can_run_twice_in_any_order_and_through_nested_regions():
    x = leaf(64, 64)
    seen = []

    def run(engine: OffloadEngine | None) -> list[torch.Tensor]:
        x.grad = None
        sites = Sites(engine)
        h = x * 2
        first = sites(lambda h: sites(torch.exp, h.sin()) * h, h)
        second = sites(lambda h: h.cos() * h, first)
        unpacked = first.grad_fn._saved_self  # unpacked outside backward
        seen.append(unpacked.clone())
        gradients = []
        for loss in (first, second, first, second, first + second):  # in forward order and in reverse
            (gradient,) = torch.autograd.grad(loss.sum(), x, retain_graph=True)
            gradients.append(gradient)
        return gradients

    engine = make_engine()
    assert_same_bits(run(None), run(engine))
    assert_same_bits(seen[:1], seen[1:])
    engine.close()


def test_fault_11_an_exception_inside_a_region_leaves_no_hooks():
    engine = make_engine()
    saw_hooks = []

    def fail(h: torch.Tensor) -> torch.Tensor:
        saw_hooks.append(has_hooks())
        raise ValueError("user error")

    sites = Sites(engine)
    with sites.watched(), pytest.raises(ValueError, match="user error"):
        sites(lambda h: sites(fail, h.sin()), leaf(64, 64) * 2)
    assert saw_hooks == [True]
    assert not has_hooks()
    engine.close()


def test_fault_12_reloaded_tensors_are_freed_during_backward():
    x = leaf(64, 64)
    engine = make_engine(policy=TransferPolicy(window_bytes=0, prefetch_bytes=0))
    ledger = ActivationLedger(parameters=[x])
    with without_the_cyclic_collector(), engine.observe(ledger), ledger.watch():
        output = run_layers(Sites(engine), x * 2, count=12).sum()
        forward_samples = len(ledger.samples)
        output.backward()
    assert count_offloaded_bytes(engine) == 12 * NBYTES
    assert max(sample.resident_bytes for sample in ledger.samples[forward_samples:]) <= 2 * NBYTES  # this layer and the next
    engine.close()


@DEVICES
def test_fault_13_a_storage_that_is_still_referenced_elsewhere_is_not_changed(make_device):
    engine = make_engine(make_device())
    referenced = leaf(64, 64) * 2
    before = referenced.detach().clone()
    output = Sites(engine)(torch.sin, referenced)
    assert count_offloaded_bytes(engine) == NBYTES
    assert referenced.untyped_storage().nbytes() == NBYTES
    assert_same_bits([before], [referenced])
    output.sum().backward()
    assert engine.finish_step().tags["core_attn"].held_elsewhere_bytes == NBYTES
    engine.close()


@DEVICES
def test_fault_14_reloaded_tensors_keep_their_strides(make_device):
    seen = []

    class RecordStrides(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            views = (tensor.t(), tensor[::2, 1:], tensor[:1].expand(5, 64), tensor.view(4, 16, 64).permute(2, 0, 1))
            ctx.save_for_backward(*views)
            return tensor.sin()

        @staticmethod
        def backward(ctx, gradient):
            seen.append([(saved.size(), saved.stride()) for saved in ctx.saved_tensors])
            return sum(saved.sum() for saved in ctx.saved_tensors) * gradient

    x = leaf(64, 64)
    check_same_bits(lambda sites: sites(RecordStrides.apply, x * 2), [x], make_engine(make_device())).close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("moment", ["before its copy is queued", "while its copy is queued", "before its copy is confirmed"])
def test_fault_15_an_in_place_change_after_the_save_raises_with_tag_layer_and_microbatch(moment):
    engine = make_engine(DelayedCpuDevice(), policy=TransferPolicy(window_bytes=1 << 30))
    h = leaf(64, 64) * 2
    output = Sites(engine, microbatch=3)(torch.sin, h, is_held=moment == "before its copy is queued").sum()
    with torch.no_grad():
        h.mul_(2)
    if "confirmed" in moment:
        engine.close()  # finishes the copy and releases the source
    engine.flush()  # no error yet, since backward may not use the tensor
    with pytest.raises(StateError, match=r"layers\.1\.core_attn mb=3 saved for backward was changed in place before"):
        output.backward()


def test_fault_16_two_models_in_one_process_share_nothing():
    x = leaf(64, 64)
    engines = [make_engine(), make_engine(min_offloaded_numel=1 << 20)]
    expected = get_gradients(lambda sites: run_layers(sites, x * 2), [x], Sites(None))
    x.grad = None
    outputs = [run_layers(Sites(engine), x * 2) for engine in engines]
    assert [count_offloaded_bytes(engine) for engine in engines] == [4 * NBYTES, 0]
    engines[1].close()
    assert_same_bits(expected, get_gradients(lambda sites: outputs[0], [x], Sites(None)))
    assert [engine.arena.reserved_bytes > 0 for engine in engines] == [True, False]
    engines[0].close()


def test_fault_17_host_memory_is_exact_within_budget_and_reused_across_shapes():
    shapes = [(96, 96), (3, 7, 512), (1152,)]  # 36, 42 and 4.5 KiB: multiples of 512 bytes, but not powers of two
    budget_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    engine = make_engine(host_budget_bytes=budget_bytes)
    for step_shapes in (shapes, shapes[::-1], [(budget_bytes // 4,)]):
        outputs = [Sites(engine)(torch.sin, leaf(*shape) * 2) for shape in step_shapes]
        assert engine.arena.used_bytes == engine.arena.reserved_bytes == count_offloaded_bytes(engine) == budget_bytes
        over_budget = Sites(engine)(torch.sin, leaf(128) * 2)
        stats = engine.finish_step().tags["core_attn"]
        assert stats.kept_bytes == {KeptReason.HOST_BUDGET.value: 512}
        assert engine.arena.reserved_bytes == budget_bytes
        del outputs, over_budget
    engine.close()


def test_fault_18_a_tag_without_effect_is_refused():
    offload = megatron.apply(OffloadConfig(offload_modules=("core_attn", "moe_act")))
    try:
        offload.begin_microbatch(0)
        region = offload.find_region("core_attn")
        with region.saving():
            output = (leaf(1024, 1024) * 2).sin()
        region.end(output)
        with pytest.raises(IntegrationError, match="'moe_act' has no site in this model on any rank, so it has no effect"):
            offload.finish_step()
    finally:
        offload.remove()


def test_fault_19_a_held_back_group_queues_no_copy_before_the_flush():
    device = ClockedCpuDevice()
    engine = make_engine(device)
    x = leaf(64, 64)
    sites = Sites(engine)
    waits_before = device.queue(device.d2h_stream)
    h = sites(torch.exp, sites(torch.sin, x * 2, is_held=True), is_held=True)
    assert device.copies == []
    small_copy = device.queue(device.d2h_stream)  # like the copy of the token counts, on which the host synchronizes
    assert small_copy.clock == {device.d2h_stream: waits_before.clock[device.d2h_stream] + 1}  # it waits for no other stream
    engine.flush()
    assert len(device.copies) == 2
    assert all(small_copy.is_before(copy) for copy in device.copies)
    h.sum().backward()
    engine.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"min_offloaded_numel": 1 << 20}, {"host_budget_bytes": 512}, {"keep": torch.is_tensor}],
    ids=["offloaded", "too small", "no host memory", "kept"],
)
def test_fault_20_a_saved_output_creates_no_reference_cycle(options):
    engine = make_engine(**options)
    x = leaf(64, 64)
    with without_the_cyclic_collector():
        output = Sites(engine)(torch.exp, x * 2)  # saves its output, which has a grad_fn
        storage = StorageWeakRef(output.untyped_storage())
        assert not storage.expired()
        del output
        assert storage.expired()
        assert engine.arena.used_bytes == 0
    engine.close()


@pytest.mark.parametrize("is_marked", [True, False])
def test_fault_21_a_resized_storage_raises_unless_it_was_marked_to_be_kept(is_marked):
    engine = make_engine()
    h = leaf(64, 64) * 2
    contents = h.detach().clone()
    if is_marked:
        engine.keep([h], reason=KeptReason.RECOMPUTED)
    output = Sites(engine)(torch.sin, h, is_held=True)
    h.untyped_storage().resize_(0)
    engine.flush()
    if not is_marked:
        with pytest.raises(StateError, match=r"was resized before backward used it.* had 16384 bytes .* now has 0"):
            output.sum().backward()
        return
    h.untyped_storage().resize_(NBYTES)
    h.untyped_storage().copy_(contents.untyped_storage())
    (gradient,) = torch.autograd.grad(output.sum(), h)
    assert_same_bits([contents.cos()], [gradient])
    assert count_offloaded_bytes(engine) == 0


@DEVICES
def test_fault_22_a_region_output_is_not_a_view_and_megatron_can_deallocate_it(make_device):
    schedules = load_module("megatron.core.pipeline_parallel.schedules")
    x = leaf(64, 64)
    gradients = []
    for engine in (None, make_engine(make_device())):
        x.grad = None
        h = x * 2
        first = Sites(engine)(torch.exp, h)  # saves its output
        second = Sites(engine)(torch.sin, h)
        assert h._base is first._base is second._base is None
        second.add_(first)
        for output in (first, second):
            schedules.deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
            assert output.numel() == 1
        schedules.custom_backward(second, torch.ones(64, 64))
        gradients.append(x.grad)
    assert_same_bits(gradients[:1], gradients[1:])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_fault_23_a_region_in_a_checkpoint_neither_disables_it_nor_saves_its_recompute(use_reentrant):
    x = leaf(64, 64)
    saved_bytes = []
    for engine in (None, make_engine()):
        sites = Sites(engine)
        ledger = ActivationLedger(parameters=[x])
        with ledger.watch():
            output = checkpoint(lambda h, sites=sites: run_layers(sites, h, count=8), x * 2, use_reentrant=use_reentrant)
        saved_bytes.append(ledger.samples[-1].resident_bytes)
        output.sum().backward()
    assert saved_bytes == [NBYTES, NBYTES]  # the checkpoint's input, not eight layers
    assert engine.finish_step().tags == {}
    engine.close()
