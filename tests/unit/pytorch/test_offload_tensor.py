"""Tests `offload_tensor`, which offloads and reloads a single tensor."""

import gc
import weakref

import pytest
import torch
from support.models import ALL, make_net
from support.sites import DelayedCpuDevice

import fgoffload
from fgoffload import StateError, TransferConfig
from fgoffload.engine import KeptReason
from fgoffload.engine.identity import StorageRef

pytestmark = pytest.mark.quick

BASE = torch.arange(1000, dtype=torch.float32)
TENSORS = {
    "contiguous": BASE.clone(),
    "transposed": BASE.reshape(10, 100).t(),
    "with an offset": BASE[100:200].view(10, 10),
    "every other": BASE[::2],
    "a column": BASE.view(10, 100)[:, 3],
    "expanded": BASE[:10].unsqueeze(1).expand(10, 5),
    "bfloat16": BASE.bfloat16(),
    "booleans": BASE > 500,
    "zero-dimensional": BASE[7],
    "empty": BASE[:0],
}


@pytest.mark.parametrize("make_device", [lambda: None, DelayedCpuDevice], ids=["cpu", "delayed"])
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_reloaded_with_its_bytes_size_and_strides(kind, make_device):
    tensor = TENSORS[kind]
    with fgoffload.saved_tensors(ALL, device=make_device() or "cpu") as store:
        reloaded = store.offload_tensor(tensor).reload()
    assert torch.equal(reloaded, tensor)
    assert (reloaded.dtype, reloaded.stride(), reloaded.device) == (tensor.dtype, tensor.stride(), tensor.device)
    assert torch.equal(fgoffload.offload_tensor(tensor, device=make_device()).reload(), tensor)


def test_device_memory_is_freed_at_once_and_host_memory_with_the_object():
    store = fgoffload.saved_tensors(ALL, device="cpu")
    tensor = torch.ones(4096)
    storage = StorageRef(tensor)
    offloaded = store.offload_tensor(tensor)
    del tensor
    assert offloaded.is_on_host
    assert storage.is_freed
    assert store.engine.arena.used_bytes == 4096 * 4
    assert offloaded.reload().sum() == 4096
    del offloaded
    assert store.engine.arena.used_bytes == 0
    store.close()


def test_one_tensor_without_a_model_reserves_host_memory_of_exactly_its_size():
    offloaded = fgoffload.offload_tensor(torch.ones(1000))
    assert offloaded.is_on_host
    assert offloaded._engine.arena.reserved_bytes == 4096  # 4000, in multiples of 512
    engine = weakref.ref(offloaded._engine)
    del offloaded
    gc.collect()
    assert engine() is None


def test_a_tensor_stays_on_the_gpu_until_its_copy_is_done():
    device = DelayedCpuDevice()
    store = fgoffload.saved_tensors(TransferConfig(min_offloaded_bytes=0), device=device)
    early, late = store.offload_tensor(BASE.clone()), store.offload_tensor(BASE + 1)
    assert not early.is_on_host
    assert torch.equal(early.reload(), BASE)
    device.synchronize(device.record_event(device.d2h_stream))
    assert late.is_on_host  # the query frees the device memory, since nothing else calls the engine
    assert torch.equal(late.reload(), BASE + 1)


def test_prefetch_starts_the_reload():
    store = fgoffload.saved_tensors(ALL, device=DelayedCpuDevice())
    offloaded = store.offload_tensor(BASE.clone())
    assert store.engine.finish_step().h2d_bytes == 0
    offloaded.prefetch()
    offloaded.prefetch()
    assert store.engine.finish_step().h2d_bytes == 4000
    assert torch.equal(offloaded.reload(), BASE)
    assert store.engine.finish_step().prefetch_misses == 0


def test_an_in_place_change_of_a_reloaded_tensor_is_refused_at_the_next_reload():
    offloaded = fgoffload.offload_tensor(BASE.clone())
    offloaded.reload().add_(1)
    with pytest.raises(StateError, match="changed in place"):
        offloaded.reload()


def test_parameters_and_small_tensors_are_returned_and_counted():
    net = make_net()
    with fgoffload.offload(net, ["layers.*.mlp"], TransferConfig(min_offloaded_bytes=1 << 20)) as handle:
        weight, small = net.layers[0].norm.weight, torch.ones(8)
        kept = [handle.offload_tensor(weight), handle.offload_tensor(small)]
        assert [offloaded.is_on_host for offloaded in kept] == [False, False]
        assert torch.equal(kept[0].reload(), weight)
        assert torch.equal(kept[1].reload(), small)
        assert handle.stats().tags["by_hand"].kept_bytes == {KeptReason.TOO_SMALL.value: 32}


def test_a_parameter_is_returned_detached_without_a_copy():
    parameter = torch.nn.Parameter(BASE.clone())
    offloaded = fgoffload.offload_tensor(parameter)
    reloaded = offloaded.reload()
    assert not reloaded.requires_grad
    assert type(reloaded) is torch.Tensor
    assert torch.equal(reloaded, parameter)
    assert offloaded.reload().data_ptr() == reloaded.data_ptr() == parameter.data_ptr()
    with torch.no_grad():
        reloaded.add_(1)
    with pytest.raises(StateError, match="changed in place"):
        offloaded.reload()
