"""Every element type, every layout of bytes and every kind of tensor: moved to the bit, or left alone with a reason."""

from collections.abc import Iterator

import pytest
import torch
from support.sites import Sites, check_same_bits, make_engine
from support.tensors import get_bits, leaf
from torch.testing._internal.two_tensor import TwoTensor

from fgoffload import StateError
from fgoffload.engine import CpuDevice, DelayedCpuDevice, KeptReason, OffloadEngine

DEVICES = pytest.mark.parametrize("make_device", [CpuDevice, DelayedCpuDevice], ids=["cpu", "delayed"])


class SaveAs(torch.autograd.Function):
    """Saves what `make` returns, and gives to `look` what backward gets of it."""

    @staticmethod
    def forward(ctx, tensor, make, look):
        ctx.look = look
        ctx.save_for_backward(make())
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.look(ctx.saved_tensors[0])
        return gradient, None, None


def save_and_take(make, make_device=CpuDevice) -> tuple[list[torch.Tensor], int, dict[str, int]]:
    """Return what backward gets without and with an engine, the bytes that left, and those that stayed by reason."""
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
    """Return 16 KiB of every byte value, NaNs of every kind and bools that are neither 0 nor 1 among them."""
    generator = torch.Generator().manual_seed(3)
    octets = torch.randint(0, 256, (16384,), generator=generator, dtype=torch.uint8)
    return octets.view(dtype).view(64, -1)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_comes_back_to_the_bit(dtype, make_device):
    (without, found), moved, _ = save_and_take(lambda: make_all_bytes(dtype), make_device)
    assert found.dtype == dtype
    assert torch.equal(get_bits(found), get_bits(without))
    assert moved == 16384


def make_storage() -> torch.Tensor:
    return torch.arange(4096, dtype=torch.float32)


LAYOUTS = {
    "a single number": lambda: make_storage()[77],
    "one element": lambda: make_storage()[4095:],
    "expanded in all dimensions": lambda: make_storage()[5].expand(3, 4),
    "expanded in between": lambda: make_storage()[:32].view(8, 1, 4).expand(8, 6, 4),
    "zero strides by as_strided": lambda: make_storage().as_strided((4, 5), (0, 0), 9),
    "overlapping rows": lambda: make_storage().as_strided((30, 20), (3, 1), 7),
    "a larger stride inside": lambda: make_storage().as_strided((5, 6, 7), (1, 700, 10), 3),
    "a size of one with a stride beyond the storage": lambda: make_storage().as_strided((1, 8), (1 << 20, 1), 2),
    "a size of one with a stride beyond the storage, from its start": lambda: make_storage().as_strided((1, 8), (1 << 20, 1)),
    "channels last": lambda: make_storage().view(4, 4, 16, 16).to(memory_format=torch.channels_last),
    "permuted": lambda: make_storage().view(8, 16, 32).permute(2, 0, 1),
    "the end of the storage": lambda: make_storage()[-3:],
    "an odd offset in bytes": lambda: make_storage().view(torch.uint8)[1001:2002],
    "diagonal": lambda: make_storage().view(64, 64).diagonal(),
}


@DEVICES
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_back_with_its_strides_and_values(name, make_device):
    (without, found), moved, _ = save_and_take(LAYOUTS[name], make_device)
    assert torch.equal(found, without)
    assert moved > 0
    kept: list[tuple] = []
    for engine in (None, make_engine(make_device())):
        x = leaf(4)
        Sites(engine)(
            lambda h: SaveAs.apply(h, LAYOUTS[name], lambda saved: kept.append((saved.size(), saved.stride()))), x * 2
        ).sum().backward()
    assert kept[0] == kept[1]


@pytest.mark.parametrize("size", [(0,), (0, 5), (7, 0, 3)], ids=str)
def test_a_tensor_without_elements_stays_and_keeps_its_shape(size):
    (without, found), moved, kept = save_and_take(lambda: make_storage()[:0].reshape(size))
    assert found.size() == without.size() == torch.Size(size)
    assert found.stride() == without.stride()
    assert moved == 0
    assert kept == {KeptReason.EMPTY.value: 0}


def test_weights_and_biases_that_are_not_there_do_not_go_through_the_engine(monkeypatch):
    # A linear of many experts saves dozens of both, and its host is what the device waits for.
    weights, biases = [torch.nn.Parameter(torch.ones(4)) for _ in range(16)], [torch.empty(0) for _ in range(16)]
    saved, seen, detached, engine = [], [], [], make_engine()
    original, detach = OffloadEngine.save, torch.Tensor.detach
    monkeypatch.setattr(torch.Tensor, "detach", lambda tensor: detached.append(tensor) or detach(tensor))
    monkeypatch.setattr(
        OffloadEngine, "save", lambda self, tensor, **place: saved.append(tensor) or original(self, tensor, **place)
    )

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *others):
            ctx.save_for_backward(x, *others)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors[1:])
            return gradient, *(None,) * 32

    Sites(engine)(lambda h: Linear.apply(h, *weights, *biases), leaf(4) * 2).sum().backward()
    assert len(saved) == 1
    # What is not there has no graph that a handle could hold, and to detach it takes as long as all else that is done about it.
    assert not any(tensor.numel() == 0 or isinstance(tensor, torch.nn.Parameter) for tensor in detached)
    assert [one.data_ptr() for one in seen[:16]] == [weight.data_ptr() for weight in weights]
    assert [one.size() for one in seen[16:]] == [torch.Size([0])] * 16
    stats = engine.finish_step().tags["core_attn"]
    assert (stats.saved_tensors, stats.d2h_bytes > 0) == (33, True)


def test_a_weight_that_was_changed_in_place_is_not_given_to_backward():
    weight, engine = torch.nn.Parameter(torch.ones(4)), make_engine()
    output = Sites(engine)(lambda h: h * weight, leaf(4) * 2).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(StateError, match=r"was changed in place before backward took it"):
        output.backward()


KEPT = {
    "conjugate": (lambda: make_all_bytes(torch.complex64).conj(), KeptReason.LAYOUT),
    "negative": (lambda: make_storage().view(torch.complex64).conj().imag, KeptReason.LAYOUT),
    "sparse": (lambda: torch.eye(8).to_sparse(), KeptReason.LAYOUT),
    "compressed rows": (lambda: torch.eye(8).to_sparse_csr(), KeptReason.LAYOUT),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8), KeptReason.LAYOUT),
    "two tensors in one": (lambda: TwoTensor(torch.ones(8, 8), torch.zeros(8, 8)), KeptReason.SUBCLASS),
    "a subclass that only has another name": (lambda: torch.ones(8, 8).as_subclass(Named), KeptReason.SUBCLASS),
    "on no device": (lambda: torch.empty(8, 8, device="meta"), KeptReason.OTHER_DEVICE),
}


class Named(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", KEPT)
def test_a_tensor_that_is_no_plain_bytes_stays_and_says_why(name):
    make, reason = KEPT[name]
    (without, found), moved, kept = save_and_take(make)
    assert type(found) is type(without)
    assert found.layout is without.layout
    assert moved == 0
    assert set(kept) == {reason.value}


@pytest.fixture
def _one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_a_distributed_tensor_stays_and_computes_the_same():
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    x, w = leaf(64, 64), leaf(64, 64, seed=1)

    def forward(sites: Sites) -> torch.Tensor:
        h = DTensor.from_local(x * 2, mesh, [Replicate()])
        k = DTensor.from_local(w * 1, mesh, [Replicate()])
        return sites(lambda h: (h @ k).sin(), h).to_local()

    engine = check_same_bits(forward, [x, w])
    stats = engine.finish_step().tags["core_attn"]
    assert stats.d2h_bytes == 0
    assert stats.kept_bytes == {KeptReason.SUBCLASS.value: 3 * 64 * 64 * 4}  # two factors and their product
    engine.close()


def test_saved_inference_tensors_are_refused_by_torch_as_without_an_engine():
    with torch.inference_mode():
        table = torch.ones(8, 8)
    for engine in (None, make_engine()):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            Sites(engine)(lambda h: h * table, leaf(8, 8) * 2)
