"""Tests `fgoffload.saved_tensors` with backward after or inside the block."""

import gc
import threading

import pytest
import torch
from support.models import ALL, ROW_BYTES, check_equal, copy_gradients, get_gradients, make_inputs, make_net
from support.sites import DelayedCpuDevice, has_hooks
from torch.utils.checkpoint import checkpoint

import fgoffload
from fgoffload import ConfigError
from fgoffload.engine import Group, KeptReason

pytestmark = pytest.mark.quick


def make_block(device=None, **options):
    options.setdefault("group_bytes", 3 * ROW_BYTES)
    return fgoffload.saved_tensors(ALL, device=device or "cpu", **options)


@pytest.mark.parametrize("group_bytes", [1, 3 * ROW_BYTES, 1 << 30])
def test_gradients_are_bitwise_identical_with_backward_after_the_block(group_bytes):
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    block = make_block(DelayedCpuDevice(), group_bytes=group_bytes)

    def run() -> torch.Tensor:
        with block:
            return net(inputs)

    for _ in range(2):
        check_equal(expected, get_gradients(net, run))
        assert not has_hooks()
    assert block.stats().d2h_bytes > 0
    block.close()


@pytest.mark.parametrize("group_bytes", [1, 3 * ROW_BYTES, 1 << 30])
def test_gradients_are_bitwise_identical_with_backward_inside_the_block(group_bytes):
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    block = make_block(DelayedCpuDevice(), group_bytes=group_bytes)
    for _ in range(2):
        net.zero_grad()
        with block:
            net(inputs).backward()
        check_equal(expected, copy_gradients(net))
    assert block.engine.arena.used_bytes == 0
    block.close()


def test_groups_are_offloaded_when_they_reach_group_bytes():
    x = make_inputs().requires_grad_()
    block = make_block(group_bytes=2 * ROW_BYTES)
    with block:
        hidden = x * 2
        for _ in range(5):
            hidden = hidden.sin()  # each saves its input, a separate tensor
        before = block.engine.finish_step()
    assert (before.d2h_bytes, before.tags["saved"].groups) == (4 * ROW_BYTES, 3)
    assert block.stats().d2h_bytes == ROW_BYTES
    hidden.sum().backward()
    block.close()


def test_halves_of_a_storage_saved_by_consecutive_ops_are_in_one_group():
    x = make_inputs().requires_grad_()
    block = make_block(group_bytes=1)
    with block:
        both = x * 2
        gate, up = both.chunk(2, dim=-1)
        output = torch.nn.functional.silu(gate) * up  # saves `gate`, then `up` and the output of silu
    assert block.stats().d2h_bytes == both.nbytes + output.nbytes  # two groups would copy `both` twice
    output.sum().backward()
    block.close()


def test_groups_are_prefetched_before_backward_uses_them():
    x = make_inputs().requires_grad_()
    block = make_block(group_bytes=ROW_BYTES)
    with block:
        hidden = x * 2
        for _ in range(6):
            hidden = hidden.sin()
    hidden.sum().backward()
    stats = block.stats()
    assert (stats.h2d_bytes, stats.prefetch_misses) == (6 * ROW_BYTES, 1)  # only the first group in backward is late
    block.close()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("is_backward_inside", [True, False])
def test_a_checkpoint_inside_the_block_offloads_its_input_and_still_recomputes(use_reentrant, is_backward_inside):
    x = make_inputs().requires_grad_()

    def run(block) -> torch.Tensor:
        x.grad = None
        with block:
            loss = checkpoint(lambda h: h.sin().exp(), x * 2, use_reentrant=use_reentrant).cos().sum()
            if is_backward_inside:
                loss.backward()
        if not is_backward_inside:
            loss.backward()
        return x.grad.clone()

    block = make_block(group_bytes=1)
    check_equal([run(torch.enable_grad())], [run(block)])
    # The input of the cosine is the last save in the block. A backward inside uses it before its group ends.
    assert block.stats().d2h_bytes == (1 if is_backward_inside else 2) * ROW_BYTES
    block.close()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_block_inside_a_checkpoint_does_nothing(use_reentrant):
    x = make_inputs().requires_grad_()
    block = make_block()

    def function(h: torch.Tensor) -> torch.Tensor:
        with block:
            return h.sin().exp()

    checkpoint(function, x * 2, use_reentrant=use_reentrant).sum().backward()
    assert block.engine is None
    assert not has_hooks()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_block_without_grad_does_nothing(context):
    block = make_block()
    with context(), block:
        make_net()(make_inputs())
    assert block.engine is None


def test_a_block_created_in_the_with_statement_releases_host_memory_with_the_graph():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with make_block() as block:
        loss = net(inputs)
    engine = block.engine
    del block
    net.zero_grad()
    loss.backward()
    check_equal(expected, copy_gradients(net))
    assert engine.arena.used_bytes == 0


def raise_in(block, kind: type[BaseException]) -> None:
    with block:
        loss = make_net()(make_inputs())
        raise kind(f"user error at {loss}")  # keeps the graph alive until the block exits


def test_after_an_exception_in_a_block_no_hooks_remain_and_the_next_step_is_correct():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    block = make_block(group_bytes=1 << 30)
    for kind in (ValueError, KeyboardInterrupt):
        with pytest.raises(kind):
            raise_in(block, kind)
        assert not has_hooks()
    assert block.engine.finish_step().d2h_bytes == 0  # no backward uses its tensors

    def run() -> torch.Tensor:
        with block:
            return net(inputs)

    check_equal(expected, get_gradients(net, run))
    gc.collect()
    assert block.engine.arena.used_bytes == 0
    block.close()


def test_a_block_can_be_nested_in_itself():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs) + net.layers[0](inputs).sum())
    block = make_block()

    def run() -> torch.Tensor:
        with block:
            first = net(inputs)
            with block:
                return first + net.layers[0](inputs).sum()

    check_equal(expected, get_gradients(net, run))
    assert not has_hooks()
    block.close()


def test_leaving_a_block_closes_only_the_group_of_the_current_thread():
    x = make_inputs().requires_grad_()
    block = make_block(group_bytes=1 << 30)
    has_entered, may_continue = threading.Event(), threading.Event()
    outputs = []

    def run() -> None:
        with block:
            has_entered.set()
            assert may_continue.wait(30)
            outputs.append((x * 2).sin())

    thread = threading.Thread(target=run)
    with block:
        thread.start()
        assert has_entered.wait(30)
        outputs.append((x * 2).sin())
    may_continue.set()
    thread.join(30)
    assert block.stats().d2h_bytes == 2 * ROW_BYTES
    block.close()


def test_a_model_with_regions_inside_a_block_is_bitwise_identical():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    block = make_block()

    def run() -> torch.Tensor:
        with block:
            return net(inputs)

    with fgoffload.offload(net, ["layers.*.mlp"], ALL) as handle:
        check_equal(expected, get_gradients(net, run))
        assert handle.stats().d2h_bytes > 0
    block.close()


def test_tensors_on_another_device_are_kept_and_reported(caplog):
    block = fgoffload.saved_tensors(ALL, device=OtherDevice())
    with block:
        loss = make_net()(make_inputs())
    kept = block.stats().tags["saved"].kept_bytes
    assert set(kept) == {KeptReason.OTHER_DEVICE.value}
    assert "tag 'saved' offloaded nothing: everything stayed on the device" in caplog.text
    assert "not in the memory of the engine's device" in caplog.text
    loss.backward()
    block.close()


class OtherDevice(DelayedCpuDevice):
    def owns(self, tensor: torch.Tensor) -> bool:
        return False


@pytest.mark.parametrize("group_bytes", [0, -1])
def test_group_bytes_below_1_is_refused(group_bytes):
    with pytest.raises(ConfigError, match=rf"group_bytes {group_bytes} is not above 0"):
        fgoffload.saved_tensors(group_bytes=group_bytes)


@pytest.mark.parametrize("group_bytes", [1, 3 * ROW_BYTES, 1 << 30])
def test_memory_does_not_grow_in_a_training_loop_inside_one_block(group_bytes):
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    groups = []
    with make_block(group_bytes=group_bytes) as block:
        for _ in range(4):
            check_equal(expected, get_gradients(net, lambda: net(inputs)))
            groups.append(sum(type(found) is Group for found in gc.get_objects()))
            assert block.stats().tags["saved"].groups > 0
    assert max(groups) == groups[0]  # groups of earlier tests may be freed meanwhile
    assert block.engine.arena.used_bytes == 0
