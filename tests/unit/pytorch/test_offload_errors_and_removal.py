"""Tests errors and removal of `fgoffload.offload`: no hooks remain, and the model is restored."""

import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import weakref

import pytest
import torch
from support.models import ALL, LAYERS, PATTERNS, ROW_BYTES, WIDTH, check_equal, get_gradients, make_inputs, make_net
from support.sites import has_hooks
from torch import nn

import fgoffload
from fgoffload import ConfigError, StateError, TransferConfig
from fgoffload.engine import KeptReason

pytestmark = pytest.mark.quick


def count_replaced(model: nn.Module) -> int:
    return sum("forward" in vars(module) for module in model.modules())


class RaiseError(nn.Module):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise self.kind(f"user error in {hidden.sin().shape}")


def test_after_an_exception_in_a_region_no_hooks_remain_and_the_next_step_is_correct():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, {**PATTERNS, "layers.1": "layer"}, ALL) as handle:
        net.layers[1].mlp[1] = RaiseError(ValueError)
        with pytest.raises(ValueError, match="user error"):
            net(inputs)
        assert not has_hooks()
        net.layers[1].mlp[1] = nn.GELU()
        check_equal(expected, get_gradients(net, lambda: net(inputs)))
        assert handle.engine.arena.used_bytes == 0


def test_forward_is_correct_after_an_exception_that_the_model_catches():
    class CatchError(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Tanh(), RaiseError(ValueError))
            self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            try:
                return self.first(hidden).sum()
            except ValueError:
                return self.second(hidden).sum()  # runs while the exception is handled

    model, inputs = CatchError(), make_inputs().requires_grad_()
    expected = get_gradients(model, lambda: model(inputs * 2))
    with fgoffload.offload(model, ["first", "second"], ALL) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs * 2)))
        tags = handle.stats().tags
    assert tags["second"].d2h_bytes == 2 * ROW_BYTES
    assert tags["first"].d2h_bytes == 0  # no backward uses its tensors
    assert not has_hooks()


def check_after_interrupt(net: nn.Module, handle: fgoffload.ModelOffload, expected: list[torch.Tensor]) -> None:
    """Check that the next step is correct, and leaks neither hooks nor host memory."""
    inputs = make_inputs()
    check_equal(expected, get_gradients(net, lambda: net(inputs)))
    assert not has_hooks()
    assert handle.engine.arena.used_bytes == 0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("part", ["model", "layer", "context"])
def test_after_an_interrupt_no_hooks_remain_and_the_next_step_is_correct(part, kind):
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, {**PATTERNS, "layers.1": "layer"}, ALL) as handle:
        net.layers[1](inputs)
        for _ in range(2):
            net.layers[1].mlp[1] = RaiseError(kind)
            with pytest.raises(kind), handle.forward() if part == "context" else contextlib.nullcontext():
                (net if part == "model" else net.layers[1])(inputs.requires_grad_())
            assert not has_hooks()
            net.layers[1].mlp[1] = nn.GELU()
            inputs = make_inputs()
            check_after_interrupt(net, handle, expected)


def test_remove_leaves_other_saved_tensor_hooks_in_place():
    net, inputs = make_net(), make_inputs().requires_grad_()
    handle = fgoffload.offload(net, PATTERNS, ALL)

    def interrupt(module: nn.Module, *given: object) -> None:
        raise KeyboardInterrupt

    net.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net(inputs)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        handle.remove()
        inputs.tanh()
    assert len(packed) == 1
    assert not has_hooks()


def test_remove_restores_each_module_attribute():
    net = make_net()
    original = net.layers[0].mlp.forward = functools.partial(type(net.layers[0].mlp).forward, net.layers[0].mlp)
    inputs = make_inputs()
    before = [dict(vars(module)) for module in net.modules()]
    handle = fgoffload.offload(net, PATTERNS, ALL)
    assert inspect.signature(net.forward) == inspect.signature(type(net).forward.__get__(net))
    net.layers[0].mlp(inputs)
    assert net.layers[0].mlp.forward is not original
    handle.remove()
    assert [vars(module).keys() for module in net.modules()] == [found.keys() for found in before]
    assert net.layers[0].mlp.forward is original


@pytest.mark.parametrize("is_whole", [True, False], ids=["model", "part"])
def test_an_in_place_change_of_a_tensor_saved_in_a_region_raises(is_whole):
    class ChangeInPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.inner.forward = change

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden)

    def change(hidden: torch.Tensor) -> torch.Tensor:
        output = hidden.tanh()
        output.detach().add_(1)
        return output

    model, hidden = ChangeInPlace(), make_inputs().requires_grad_() * 2
    with fgoffload.offload(model, ["inner"], ALL):
        output = (model if is_whole else model.inner)(hidden)  # no error yet, since backward may not use the tensor
        with pytest.raises(StateError, match=r"layers\.0\.inner mb=0 .* changed in place"):
            output.sum().backward()
    assert not has_hooks()


def test_remove_restores_all_forwards_and_can_be_called_twice():
    net, inputs = make_net(), make_inputs()
    handle = fgoffload.offload(net, PATTERNS, ALL)
    assert count_replaced(net) == 1 + 2 * LAYERS
    loss = net(inputs)
    handle.remove()
    assert count_replaced(net) == 0
    loss.backward()  # an existing graph still works
    handle.remove()
    handle.close()
    handle.close()
    assert handle.last_stats is not None


@pytest.mark.parametrize("first", [0, 1])
def test_two_handles_on_one_module_can_be_removed_in_either_order(first):
    shared = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    models = (nn.Sequential(shared), shared)
    handles = [fgoffload.offload(model, {glob: "mlp"}, ALL) for model, glob in zip(models, ("0.0", "0"), strict=True)]
    handles.pop(first).remove()
    models[1 - first](torch.ones(4, WIDTH)).sum().backward()
    assert handles[0].stats().d2h_bytes > 0


def test_the_keep_filter_and_the_minimum_size_are_respected():
    net, inputs = make_net(), make_inputs()
    config = dataclasses.replace(ALL, min_offloaded_bytes=ROW_BYTES + 1, keep=lambda tensor: tensor.shape[-1] == WIDTH)
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, PATTERNS, config) as handle:
        check_equal(expected, get_gradients(net, lambda: net(inputs)))
        tags = handle.stats().tags
    assert tags["mlp"].d2h_bytes == LAYERS * 8 * ROW_BYTES
    assert tags["mlp"].kept_bytes == {KeptReason.FILTERED.value: LAYERS * ROW_BYTES}
    assert tags["attn"].d2h_bytes == 0


def test_disabled_offload_does_not_change_the_model():
    net = make_net()
    config = TransferConfig(enabled=False)
    with fgoffload.offload(net, PATTERNS, config) as handle:
        assert count_replaced(net) == 0
        net(make_inputs()).backward()
        assert handle.engine is None
        assert not handle.offload_tensor(torch.ones(8)).is_on_host


def test_a_removed_handle_creates_no_engine_for_a_copy_of_its_model():
    net = make_net()
    handle = fgoffload.offload(net, PATTERNS, ALL)
    other = copy.deepcopy(net)
    handle.close()
    other(make_inputs()).backward()
    assert handle.engine is None


def test_an_unknown_device_is_refused():
    net = make_net()
    with pytest.raises(ConfigError, match="'gpu0'"):
        fgoffload.offload(net, PATTERNS, ALL, device="gpu0")
    assert count_replaced(net) == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("window_bytes", -1, "window_bytes -1 is below 0"),
        ("prefetch_bytes", -5, "prefetch_bytes -5 is below 0"),
        ("min_offloaded_bytes", -1, "min_offloaded_bytes -1 is below 0"),
        ("host_budget_bytes", 0, "host_budget_bytes 0 leaves no host memory"),
        ("enabled", "yes", "enabled 'yes' is not a bool"),
        ("keep", 3, "keep 3 is not callable"),
        ("host_memory", "pinned", "host_memory 'pinned' is not a HostMemory"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_field_name(field, value, message):
    with pytest.raises(ConfigError, match=message):
        TransferConfig(**{field: value})


def test_dropping_the_model_frees_weights_handle_engine_and_host_memory():
    def train() -> list[weakref.ref]:
        net = make_net()
        handle = fgoffload.offload(net, {**PATTERNS, "layers.*": "layer"}, ALL)
        net(make_inputs()).backward()
        return [*map(weakref.ref, (*net.parameters(), handle, handle.engine, handle.engine.arena))]

    gc.collect()
    gc.disable()
    try:
        assert all(reference() is None for reference in train())
    finally:
        gc.enable()
