"""Tests that `torch.compile` of a region's module, a whole model, or code around a block is bitwise identical."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from support.models import ALL, LAYERS, MLP_BYTES, PATTERNS, ROW_BYTES, WIDTH, check_equal, get_gradients, make_inputs, make_net
from support.sites import has_hooks
from torch import nn

import fgoffload

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
KEEP_ALL = dataclasses.replace(ALL, keep=torch.is_tensor)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[NEEDS_COMPILER, pytest.mark.slow])]

# From torch, if a graph begins with a tensor that is not a leaf. Torch hides this warning unless warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # from imports of inductor
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_whole(net: nn.Module, backend: str) -> Callable[..., torch.Tensor]:
    return torch.compile(net, backend=backend)


def compile_parts(net: nn.Module, backend: str) -> Callable[..., torch.Tensor]:
    for layer in net.layers:
        layer.mlp = torch.compile(layer.mlp, backend=backend)
    return net


def get_expected(compile_model: Callable[..., Callable[..., torch.Tensor]], backend: str) -> list[torch.Tensor]:
    net, inputs = make_net(), make_inputs()
    # Inductor fuses ops between graph breaks, which changes the bits. So use the same regions, but keep all tensors.
    context = fgoffload.offload(net, PATTERNS, KEEP_ALL) if backend == "inductor" else contextlib.nullcontext()
    with context:
        compiled = compile_model(net, backend)
        expected = get_gradients(net, lambda: compiled(inputs))
    torch.compiler.reset()
    return expected


def check_twice(net: nn.Module, compiled: Callable[..., torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Check the forward that compiles and the next one."""
    inputs = make_inputs()
    for _ in range(2):
        check_equal(expected, get_gradients(net, lambda: compiled(inputs)))
        assert not has_hooks()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_offloaded_first", [True, False])
@pytest.mark.parametrize("compile_model", [compile_whole, compile_parts])
def test_a_compiled_model_is_bitwise_identical(compile_model, is_offloaded_first, backend):
    expected = get_expected(compile_model, backend)
    net = make_net()
    compiled = None if is_offloaded_first else compile_model(net, backend)
    with fgoffload.offload(net if compiled is None else compiled, PATTERNS, ALL) as handle:
        check_twice(net, compile_model(net, backend) if compiled is None else compiled, expected)
        stats = handle.stats().tags["mlp"]
        assert (stats.groups, stats.d2h_bytes) == (2 * LAYERS, 2 * LAYERS * MLP_BYTES)


def test_a_model_compiled_before_offload_is_recompiled():
    expected = get_expected(compile_whole, "aot_eager")
    net = make_net()
    compiled = torch.compile(net, backend="aot_eager")
    get_gradients(net, lambda: compiled(make_inputs()))
    with fgoffload.offload(net, PATTERNS, ALL) as handle:
        check_twice(net, compiled, expected)
        assert handle.stats().tags["mlp"].d2h_bytes == 2 * LAYERS * MLP_BYTES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_outside", [True, False], ids=["block around compiled code", "block in compiled code"])
def test_a_block_around_or_inside_compiled_code_is_bitwise_identical(is_outside, backend):
    def run(config: fgoffload.TransferConfig) -> tuple[list[torch.Tensor], int]:
        net, inputs, block = make_net(), make_inputs(), fgoffload.saved_tensors(config, group_bytes=20_000, device="cpu")
        inner = torch.compile(net, backend=backend) if is_outside else net

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            with block:
                return inner(inputs)

        compiled = forward if is_outside else torch.compile(forward, backend=backend)
        first, second = (get_gradients(net, lambda: compiled(inputs)) for _ in range(2))
        check_equal(first, second)
        assert not has_hooks()
        offloaded_bytes = block.stats().d2h_bytes
        block.close()
        torch.compiler.reset()
        return first, offloaded_bytes

    (expected, kept_bytes), (found, offloaded_bytes) = run(KEEP_ALL), run(ALL)
    check_equal(expected, found)
    assert kept_bytes == 0 < offloaded_bytes
    if backend != "inductor":
        check_equal(get_expected(compile_whole, backend), found)


class PlacedRegions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 2
        with fgoffload.region(hidden, "linear") as region:
            output = self.linear(hidden).tanh()
            region.end(output)
        return output.sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hand_placed_region_in_compiled_code_is_bitwise_identical(backend):
    torch.manual_seed(0)
    model = PlacedRegions()
    compiled = torch.compile(model, backend=backend)
    expected = get_gradients(model, lambda: compiled(make_inputs()))
    torch.compiler.reset()
    with fgoffload.offload(model, config=ALL) as handle:
        check_twice(model, torch.compile(model, backend=backend), expected)
        assert handle.stats().tags["linear"].d2h_bytes == 2 * 2 * ROW_BYTES


def test_torch_refuses_fullgraph_and_no_hooks_remain():
    net = make_net()
    with fgoffload.offload(net, PATTERNS, ALL):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            torch.compile(net, backend="eager", fullgraph=True)(make_inputs())
        assert not has_hooks()
