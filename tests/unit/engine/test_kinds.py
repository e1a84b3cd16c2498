"""Tests every dtype, memory layout and kind of tensor: reloaded bitwise identical, or kept with a reason."""

from collections.abc import Iterator

import pytest
import torch
from support.sites import DelayedCpuDevice, Sites, check_same_bits, make_engine
from support.tensors import get_bits, leaf
from torch.testing._internal.two_tensor import TwoTensor

from fgoffload import StateError
from fgoffload.engine import CpuDevice, KeptReason

pytestmark = pytest.mark.quick


class SaveAs(torch.autograd.Function):
    """Saves the tensor that `make` returns, and passes the unpacked tensor to `look` in backward."""

    @staticmethod
    def forward(ctx, tensor, make, look):
        ctx.look = look
        ctx.save_for_backward(make())
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.look(ctx.saved_tensors[0])
        return gradient, None, None


def save_and_unpack(make, make_device=CpuDevice) -> tuple[list[torch.Tensor], int, dict[str, int]]:
    """Return the tensors unpacked without and with an engine, the offloaded bytes, and the kept bytes by reason."""
    seen = []
    x = leaf(4)
    engine = make_engine(make_device())
    check_same_bits(lambda sites: sites(lambda h: SaveAs.apply(h, make, lambda saved: seen.append(saved)), x * 2), [x], engine)
    stats = engine.finish_step().tags["core_attn"]
    return seen, stats.d2h_bytes, stats.kept_bytes


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
)


def make_all_bytes(dtype: torch.dtype) -> torch.Tensor:
    """Return 16 KiB with every byte value, including all NaNs, and bools that are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(3)
    octets = torch.randint(0, 256, (16384,), generator=generator, dtype=torch.uint8)
    return octets.view(dtype).view(64, -1)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_reloaded_bitwise_identical(dtype):
    (without, found), offloaded_bytes, _ = save_and_unpack(lambda: make_all_bytes(dtype), DelayedCpuDevice)
    assert found.dtype == dtype
    assert torch.equal(get_bits(found), get_bits(without))
    assert offloaded_bytes == 16384


def make_storage() -> torch.Tensor:
    return torch.arange(4096, dtype=torch.float32)


LAYOUTS = {
    "a scalar": lambda: make_storage()[77],
    "one element": lambda: make_storage()[4095:],
    "expanded in the middle": lambda: make_storage()[:32].view(8, 1, 4).expand(8, 6, 4),
    "zero strides by as_strided": lambda: make_storage().as_strided((4, 5), (0, 0), 9),
    "overlapping rows": lambda: make_storage().as_strided((30, 20), (3, 1), 7),
    "a larger inner stride": lambda: make_storage().as_strided((5, 6, 7), (1, 700, 10), 3),
    "a size of one with a stride beyond the storage": lambda: make_storage().as_strided((1, 8), (1 << 20, 1), 2),
    "channels last": lambda: make_storage().view(4, 4, 16, 16).to(memory_format=torch.channels_last),
    "the end of the storage": lambda: make_storage()[-3:],
    "an odd offset in bytes": lambda: make_storage().view(torch.uint8)[1001:2002],
    "diagonal": lambda: make_storage().view(64, 64).diagonal(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_reloaded_with_its_strides_and_values(name):
    (without, found), offloaded_bytes, _ = save_and_unpack(LAYOUTS[name], DelayedCpuDevice)
    assert torch.equal(found, without)
    assert offloaded_bytes > 0
    assert (found.size(), found.stride()) == (without.size(), without.stride())


def test_a_weight_changed_in_place_before_backward_raises():
    weight, engine = torch.nn.Parameter(torch.ones(4)), make_engine()
    output = Sites(engine)(lambda h: h * weight, leaf(4) * 2).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(StateError, match=r"was changed in place before backward used it"):
        output.backward()


KEPT = {
    "conjugate": (lambda: make_all_bytes(torch.complex64).conj(), KeptReason.LAYOUT),
    "negative": (lambda: make_storage().view(torch.complex64).conj().imag, KeptReason.LAYOUT),
    "sparse": (lambda: torch.eye(8).to_sparse(), KeptReason.LAYOUT),
    "compressed rows": (lambda: torch.eye(8).to_sparse_csr(), KeptReason.LAYOUT),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8), KeptReason.LAYOUT),
    "two-tensor subclass": (lambda: TwoTensor(torch.ones(8, 8), torch.zeros(8, 8)), KeptReason.SUBCLASS),
    "a subclass without changes": (lambda: torch.ones(8, 8).as_subclass(Named), KeptReason.SUBCLASS),
    "meta device": (lambda: torch.empty(8, 8, device="meta"), KeptReason.OTHER_DEVICE),
}


class Named(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", KEPT)
def test_an_unsupported_tensor_stays_on_the_gpu_with_a_reason(name):
    make, reason = KEPT[name]
    (without, found), offloaded_bytes, kept = save_and_unpack(make)
    assert type(found) is type(without)
    assert found.layout is without.layout
    assert offloaded_bytes == 0
    assert set(kept) == {reason.value}


@pytest.fixture
def _one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_the_local_tensor_of_a_dtensor_is_offloaded_and_bitwise_identical():
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    x, w = leaf(64, 64), leaf(64, 64, seed=1)

    def forward(sites: Sites) -> torch.Tensor:
        h = DTensor.from_local(x * 2, mesh, [Replicate()])
        k = DTensor.from_local(w * 1, mesh, [Replicate()])
        return sites(lambda h: (h @ k).sin(), h).to_local()

    engine = check_same_bits(forward, [x, w])
    stats = engine.finish_step().tags["core_attn"]
    assert stats.d2h_bytes == 3 * 64 * 64 * 4  # the two factors and their product
    assert stats.kept_bytes == {}
    engine.close()
