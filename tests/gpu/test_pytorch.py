"""Tests each API for plain PyTorch on a real device: results match a run without offload bitwise, and bytes are offloaded."""

import dataclasses

import pytest
import torch
from support.hostile import HostileGpu
from support.models import ALL, ATTN_BYTES, LAYERS, MLP_BYTES, PATTERNS, ROW_BYTES, Net, check_equal, get_gradients
from support.models import make_inputs as make_host_inputs
from support.models import make_net as make_host_net
from support.sites import Sites, has_hooks

import fgoffload
from fgoffload.engine import OffloadEngine
from fgoffload.engine.stats import TimeKind
from fgoffload.transfer_config import HostMemory

DEVICE = "cuda"
PAGEABLE = dataclasses.replace(ALL, host_memory=HostMemory.PAGEABLE)

pytestmark = pytest.mark.usefixtures("_deterministic")


def make_net() -> Net:
    return make_host_net().to(DEVICE)


def make_inputs(seed: int = 1) -> torch.Tensor:
    return make_host_inputs(seed).to(DEVICE)


@pytest.mark.parametrize("config", [ALL, PAGEABLE], ids=["pinned", "pageable"])
@pytest.mark.parametrize("modules", [PATTERNS, list(PATTERNS)], ids=["tags", "globs"])
def test_modules_selected_by_pattern_are_offloaded(modules, config):
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    with fgoffload.offload(net, modules, config) as handle:
        for _ in range(3):
            check_equal(expected, get_gradients(net, lambda: net(inputs)))
        stats = handle.stats()
        assert stats.d2h_bytes == 3 * LAYERS * (ATTN_BYTES + MLP_BYTES)
    check_equal(expected, get_gradients(net, lambda: net(inputs)))
    assert not has_hooks()


def test_all_tensors_saved_in_a_block_are_offloaded():
    net, inputs = make_net(), make_inputs()
    expected = get_gradients(net, lambda: net(inputs))
    block = fgoffload.saved_tensors(ALL, group_bytes=3 * ROW_BYTES)

    def run() -> torch.Tensor:
        with block:
            return net(inputs)

    for _ in range(3):
        check_equal(expected, get_gradients(net, run))
    assert block.stats().h2d_bytes > LAYERS * MLP_BYTES
    block.close()


def test_offload_tensor_frees_device_memory_and_reloads():
    tensor = torch.randn(1 << 20, device=DEVICE)
    expected, before = tensor.cpu(), torch.cuda.memory_allocated()
    offloaded = fgoffload.offload_tensor(tensor)
    del tensor
    torch.cuda.synchronize()
    assert offloaded.is_on_host
    assert torch.cuda.memory_allocated() == before - (4 << 20)
    assert torch.equal(offloaded.reload().cpu(), expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int32, torch.bool],
    ids=str,
)
@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.t(),
        lambda tensor: tensor[3:, 5:],
        lambda tensor: tensor[:, :1].expand(-1, 9),
        lambda tensor: tensor[:0],
        lambda tensor: tensor[::2],
    ],
    ids=["whole", "transposed", "with an offset", "expanded", "empty", "every other row"],
)
def test_dtypes_and_views_are_reloaded_bitwise_with_their_strides(view, dtype):
    unpacked = []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, saved):
            ctx.save_for_backward(saved)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            unpacked.append(ctx.saved_tensors[0])
            return gradient, None

    octets = torch.randint(0, 2 if dtype is torch.bool else 256, (64, 64 * dtype.itemsize), dtype=torch.uint8)
    values = octets.view(dtype)
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    with fgoffload.saved_tensors(ALL, group_bytes=1) as block:
        output = Save.apply(x, view(values.to(DEVICE)))
    output.sum().backward()
    expected = view(values)
    assert (unpacked[0].dtype, unpacked[0].size(), unpacked[0].stride()) == (dtype, expected.size(), expected.stride())
    as_bytes = [one.cpu().contiguous().view(torch.uint8) for one in (unpacked[0], expected)]
    assert torch.equal(*as_bytes)
    assert (block.stats().d2h_bytes > 0) == (expected.numel() > 0)
    block.close()


@pytest.mark.filterwarnings("ignore")  # from torch itself and from inductor's imports
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_offload_does_not_change_compiled_models(backend):
    inputs, expected = make_inputs(), None
    if backend == "inductor":
        pytest.importorskip("triton", reason="inductor needs Triton on a GPU")
    for offloads in (False, True):
        torch.compiler.reset()
        net = make_net()
        handle = fgoffload.offload(net, PATTERNS, ALL if offloads else dataclasses.replace(ALL, keep=torch.is_tensor))
        compiled = torch.compile(net, backend=backend)
        found = [get_gradients(net, lambda compiled=compiled: compiled(inputs)) for _ in range(2)]
        moved_bytes = handle.stats().d2h_bytes
        handle.close()
        expected = expected or found[0]
        for gradients in found:
            check_equal(expected, gradients)
        assert (moved_bytes > 0) == offloads
    torch.compiler.reset()


def test_times_are_measured_on_the_device():
    device = HostileGpu(late={"d2h", "h2d"}, milliseconds=20.0)
    engine = OffloadEngine(device=device, is_timed=True, host_budget_bytes=64 << 20)
    sites = Sites(engine)
    h = torch.randn(256, 256, device=DEVICE, requires_grad=True) * 2
    output = sites(torch.sin, h)
    del h
    torch.cuda.synchronize()
    engine.poll()
    output.sum().backward()
    seconds = engine.finish_step().tags["core_attn"].seconds
    engine.close()
    # Sleeps are counted in GPU cycles: 20 ms at 2 GHz. Compute only waits for reloads.
    assert set(seconds) == set(TimeKind)
    assert all(0.015 < seconds[kind] < 1.0 for kind in TimeKind)
