"""Tests the object that replaces a module's forward: evaluation is unchanged, copies are plain, and it can be wrapped."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from support.models import ALL, PATTERNS, check_equal, get_gradients, make_inputs, make_net
from torch import nn

import fgoffload
from fgoffload import ConfigError, StateError
from fgoffload.integrations.pytorch.replaced import ReplacedForward

MARKS = {"forward", "__getstate__", "__reduce_ex__", "_replicate_for_data_parallel", "_fgoffload_handle"}


def is_plain(model: nn.Module) -> bool:
    return not any(MARKS & vars(module).keys() for module in model.modules())


def make_transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))).eval()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_uses_the_torch_fast_path_as_without_offload(mode):
    plain, model, hidden = make_transformer(), make_transformer(), torch.randn(8, 16, 64)
    with fgoffload.offload(model, {"*": "layer", "*.self_attn": "attn", "*.linear1": "fc1"}), mode(), torch.autocast("cpu"):
        expected, found = plain(hidden), model(hidden)  # under autocast, the fast path returns another dtype
    check_equal([expected], [found])


@pytest.mark.parametrize(
    "make_copy",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        copy.copy,
        lambda model: model._replicate_for_data_parallel(),
    ],
    ids=["deep", "pickle", "shallow", "replica"],
)
def test_a_copy_of_an_offloaded_model_is_a_plain_model_that_can_be_offloaded(make_copy):
    net, inputs = make_net(), make_inputs()
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        other = make_copy(net)
        assert not MARKS & vars(other).keys()
        if other.layers is not net.layers:
            assert is_plain(other)
        other._modules = {name: copy.deepcopy(module) for name, module in net._modules.items()}
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        expected = other(inputs)
        assert handle.engine is None
        with fgoffload.offload(other, PATTERNS, ALL) as second:
            assert torch.equal(expected, other(inputs))
            assert second.stats().d2h_bytes > 0
            assert handle.engine is None
        assert not torch.equal(net(inputs), expected)
    assert is_plain(net)


def test_a_model_with_its_handle_and_block_as_attributes_can_be_copied():
    net = make_net()
    net.handle = fgoffload.offload(net, PATTERNS, ALL)
    net.block = fgoffload.saved_tensors(device="cpu")
    other = copy.deepcopy(net)
    assert other.handle is net.handle
    assert is_plain(other)
    net.handle.close()


class CustomDeepcopy(nn.Sequential):
    """Copies its attributes one by one, like every parametrized module."""

    def __deepcopy__(self, memo):
        other = memo[id(self)] = self.__new__(self.__class__)
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other


def test_a_copy_of_a_module_with_a_custom_deepcopy_is_independent():
    model = CustomDeepcopy(nn.Linear(64, 64))
    with fgoffload.offload(model, ["0"], ALL) as handle:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[0].weight.zero_()
        assert not pickle.loads(pickle.dumps(other))[0].weight.any()  # not the weights of the first model
        with fgoffload.offload(other, ["0"], ALL) as second:
            other(torch.ones(64, 64)).sum().backward()
            assert second.stats().d2h_bytes > 0
        assert handle.engine is None


@pytest.mark.parametrize("is_part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deep", "pickle"])
def test_a_copy_of_an_offloaded_graph_module_is_plain(make_copy, is_part):
    traced, inputs = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64), nn.Tanh())), make_inputs()
    model = nn.Sequential(traced) if is_part else traced
    with fgoffload.offload(model, ["0"], ALL) as handle:
        other = make_copy(model)
        assert is_plain(other)
        expected = get_gradients(other, lambda: other(inputs).sum())
        assert handle.engine is None
        check_equal(expected, get_gradients(model, lambda: model(inputs).sum()))
        assert handle.stats().d2h_bytes > 0
    assert is_plain(model)


def test_inspect_finds_the_source_of_a_replaced_forward():
    net = make_net()
    plain = inspect.getsource(net.forward)
    with fgoffload.offload(net, PATTERNS, ALL):
        assert inspect.getsource(net.forward) == plain
        assert inspect.unwrap(net.forward) == type(net).forward.__get__(net)


def test_a_wrapper_around_the_replaced_forward_survives_remove_and_copies_correctly():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    mlp = net.layers[1].mlp
    handle = fgoffload.offload(net, PATTERNS, ALL)
    mlp.forward = functools.partial(lambda forward, hidden: forward(hidden), mlp.forward)
    check_equal(expected, get_gradients(net, lambda: net(inputs)))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.layers[1].mlp[0].weight.zero_()
    assert not torch.equal(other(inputs), net(inputs))
    offloaded_bytes = handle.stats().d2h_bytes
    handle.remove()
    check_equal(expected, get_gradients(net, lambda: net(inputs)))
    assert offloaded_bytes > 0 == handle.stats().d2h_bytes
    assert mlp.forward.args[0](make_inputs()).grad_fn is not None  # the wrapped forward still runs


def test_two_nested_handles_can_be_removed_in_either_order():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    outer, inner = fgoffload.offload(net, ["layers.0"], ALL), fgoffload.offload(net.layers[0], ["mlp"], ALL)
    check_equal(expected, get_gradients(net, lambda: net(inputs)))
    assert min(outer.stats().d2h_bytes, inner.stats().d2h_bytes) > 0
    outer.remove()
    check_equal(expected, get_gradients(net, lambda: net(inputs)))
    assert inner.stats().d2h_bytes > 0
    inner.remove()
    assert is_plain(net)


def test_repeating_offload_returns_the_same_handle_and_other_arguments_are_refused():
    net = make_net()
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        assert fgoffload.offload(net, dict(PATTERNS), ALL) is handle
        for other in ({"modules": ["layers.*"], "config": ALL}, {"modules": PATTERNS}, {"modules": PATTERNS, "device": "cpu"}):
            with pytest.raises(ConfigError, match=r"with other arguments \(modules, .*memory"):
                fgoffload.offload(net, **other)
    again = fgoffload.offload(net, PATTERNS, ALL)
    assert again is not handle
    again.close()


def test_an_exception_in_offload_leaves_the_model_unchanged(monkeypatch):
    net, install = make_net(), ReplacedForward.install

    def fail_late(self: ReplacedForward) -> None:
        install(self)
        if self._tag == "mlp":
            raise KeyboardInterrupt

    monkeypatch.setattr(ReplacedForward, "install", fail_late)
    with pytest.raises(KeyboardInterrupt):
        fgoffload.offload(net, PATTERNS, ALL)
    assert is_plain(net)
    monkeypatch.undo()
    fgoffload.offload(net, PATTERNS, ALL).close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_scripted_module_can_be_a_region():
    torch.manual_seed(0)
    model, inputs = (
        nn.Sequential(nn.Linear(64, 64), torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.Tanh()))),
        make_inputs(),
    )
    for _ in range(3):  # the first two are profiled and run different code
        expected = get_gradients(model, lambda: model(inputs).sum())
    with fgoffload.offload(model, {"0": "plain", "1": "scripted"}, ALL) as handle:
        check_equal(expected, get_gradients(model, lambda: model(inputs).sum()))
        assert handle.stats().tags["scripted"].d2h_bytes > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_export_works_and_strict_export_and_scripting_ask_to_remove_the_handle():
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.randn(2, 4)
    with fgoffload.offload(model, ["0"]) as handle:
        exported = torch.export.export(model, (inputs,)).module()
        assert handle.engine is None
        check_equal([model(inputs)], [exported(inputs)])
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Call `remove` on its handle first"):
            torch.export.export(model, (inputs,), strict=True)
        with pytest.raises(StateError, match="Call `remove` on its handle first"):
            torch.jit.script(model)
    torch.jit.script(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_model_is_offloaded_after_another_of_its_class_ran_compiled():
    torch.compiler.reset()
    torch.compile(make_net(1), backend="eager")(make_inputs()).backward()
    net = make_net()
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        torch.compile(net, backend="eager")(make_inputs()).backward()
        assert handle.stats().d2h_bytes > 0
    torch.compiler.reset()
