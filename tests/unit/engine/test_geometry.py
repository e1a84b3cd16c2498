"""Tests the geometry of views: their position in a storage, and how they are packed and restored."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload.engine.geometry import gather, get_byte_range, get_gathered_bytes, get_view, rebuild, scatter

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)


@st.composite
def strided_tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    storage = torch.randint(0, 2, (4096 * 16,), dtype=torch.uint8).view(dtype)
    size = draw(st.lists(st.integers(1, 5), max_size=3))
    stride = draw(st.lists(st.integers(0, 30), min_size=len(size), max_size=len(size)))
    offset = draw(st.integers(0, 1000))
    return storage.as_strided(size, stride, offset)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@settings(max_examples=50, deadline=None)
@given(strided_tensors(), st.sampled_from(DTYPES))
def test_a_view_rebuilt_over_a_copy_of_any_dtype_shares_its_version_counter(tensor, dtype):
    view = get_view(tensor)
    start = view.start // 512 * 512
    end = start + -(-(view.end - start) // 16) * 16
    copy = get_byte_range(tensor, start=start, end=end).clone().view(dtype).view(1, -1)
    rebuilt = rebuild(view, copy, buffer_start=start)
    assert torch.equal(as_bytes(rebuilt), as_bytes(tensor))
    assert rebuilt.stride() == tensor.stride()
    assert rebuilt._base is None
    before = copy._version
    rebuilt.zero_()
    assert rebuilt._version == copy._version > before


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4))
def test_gathered_views_are_scattered_to_their_offsets(windows):
    storage = torch.randn(4096)
    tensors = [storage.as_strided((size, 3), (stride, 1), offset) for offset, size, stride in windows]
    views = [get_view(tensor) for tensor in tensors]
    dense = torch.empty(get_gathered_bytes(views), dtype=torch.uint8)
    gather(views, storage, dense)
    target = torch.empty(4096 * 4, dtype=torch.uint8)
    scatter(views, dense, target, target_start=0)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(rebuild(view, target, buffer_start=0), tensor)


def test_gathering_bools_preserves_their_bytes():
    storage = torch.arange(256, dtype=torch.uint8).repeat(8)
    tensor = storage.view(torch.bool).as_strided((100, 3), (20, 1), 5)
    views = [get_view(tensor)]
    dense, target = torch.empty(get_gathered_bytes(views), dtype=torch.uint8), torch.empty(2048, dtype=torch.uint8)
    gather(views, tensor, dense)
    scatter(views, dense, target, target_start=0)
    assert torch.equal(target.as_strided((100, 3), (20, 1), 5), storage.as_strided((100, 3), (20, 1), 5))
