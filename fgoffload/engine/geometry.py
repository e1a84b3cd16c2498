"""Describes the layout of tensors in their storages, and packs and rebuilds tensors."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

ALIGNMENT_BYTES = 512
"""Alignment of the start of a copied range, in bytes. Torch's device allocator uses the same alignment. With a different
alignment, an op on the reloaded tensor could select a different kernel, whose results could differ in the last bit."""


class View(NamedTuple):
    """Layout of a tensor in its storage. Equal views of one storage refer to the same bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    """Stride in elements."""
    start: int
    """Offset of the first byte in the storage."""
    end: int
    """Offset just past the last byte in the storage."""
    dense_bytes: int
    """Size of the packed elements. Repeated elements of an expanded dimension count once."""
    covered_bytes: int
    """Upper bound on how many bytes of the storage the view covers."""
    is_contiguous: bool
    """Whether the elements are in order and without gaps. A dimension of size 1 may have any stride."""

    def covers(self, other: "View") -> bool:
        """Return whether this view has no gaps and covers `other` from start to end."""
        return self.dense_bytes == self.end - self.start and self.start <= other.start and other.end <= self.end


def get_view(tensor: torch.Tensor) -> View:
    """Return the location and layout of the strided, non-empty `tensor` in its storage."""
    return _make_view(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@functools.lru_cache(maxsize=4096)  # this runs for every saved tensor, and all steps save the same views
def _make_view(dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> View:
    start = offset * dtype.itemsize
    reach = count = 1
    is_contiguous = True
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        # `count` is the number of elements of the inner dimensions, which is this dimension's stride if there are no gaps.
        is_contiguous &= n == 1 or step == count
        reach += (n - 1) * step
        count *= n if step else 1
    reach_bytes, dense_bytes = reach * dtype.itemsize, count * dtype.itemsize
    return View(dtype, size, stride, start, start + reach_bytes, dense_bytes, min(reach_bytes, dense_bytes), is_contiguous)


def get_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the contiguous `tensor` as uint8 `[n]`, without a copy."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return get_byte_range(tensor, start=start, end=start + tensor.numel() * tensor.element_size())


def get_byte_range(tensor: torch.Tensor, *, start: int, end: int) -> torch.Tensor:
    """Return bytes `start` to `end` of the tensor's storage as uint8 `[end - start]`, without a copy."""
    target = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return target.set_(tensor.untyped_storage(), start, (end - start,), (1,))


def rebuild(view: View, buffer: torch.Tensor, *, buffer_start: int) -> torch.Tensor:
    """Rebuild the tensor that `view` describes as a view of `buffer`, which is a copy of the storage's bytes.

    All tensors rebuilt from a buffer share its version counter. `buffer` is contiguous, has any type, and begins at the start
    of its own storage. `buffer_start`, the offset of its bytes in the saved storage, is a multiple of `ALIGNMENT_BYTES`.
    """
    itemsize = view.dtype.itemsize
    offset = (view.start - buffer_start) // itemsize
    if view.dtype is not buffer.dtype:
        octets = buffer.as_strided((buffer.nbytes // buffer.itemsize,), (1,)).view(torch.uint8)
        buffer = octets[: buffer.nbytes // itemsize * itemsize].view(view.dtype)
    # Detached, so that the tensor has no base of another type.
    return buffer.as_strided(view.size, view.stride, offset).detach()


def get_gathered_bytes(views: Sequence[View]) -> int:
    """Return the packed size of `views` in bytes, including alignment."""
    return sum(round_up(view.dense_bytes) for view in views)


def choose_gathered(views: Iterable[View], *, size_bytes: int) -> tuple[View, ...]:
    """Return the distinct `views` in packing order if their packed size is below half of `size_bytes`, or `()`."""
    packed = tuple(sorted(views, key=lambda view: (view.start, view.end)))
    return packed if 2 * get_gathered_bytes(packed) < size_bytes else ()


def gather(views: Sequence[View], tensor: torch.Tensor, dense: torch.Tensor) -> None:
    """Pack `views` of the storage of `tensor` into `dense`, on the current stream.

    `views` are in packing order, and `dense` is uint8 `[get_gathered_bytes(views)]`.
    """
    for view, values in _pair(views, dense):
        values.copy_(_select(view, tensor, start=0))


def scatter(views: Sequence[View], dense: torch.Tensor, target: torch.Tensor, *, target_start: int) -> None:
    """Unpack the views that `gather` packed, on the current stream. The bytes between views do not change.

    `target`, uint8 `[n]`, contains all views, and begins at byte `target_start` of the saved storage.
    """
    for view, values in _pair(views, dense):
        _select(view, target, start=target_start).copy_(values)


def _select(view: View, tensor: torch.Tensor, *, start: int) -> torch.Tensor:
    offset = (view.start - start) // view.dtype.itemsize
    return torch.empty(0, dtype=view.dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, view.size, view.stride)


def _pair(views: Sequence[View], dense: torch.Tensor) -> Iterator[tuple[View, torch.Tensor]]:
    """Yield each view, without repeated elements, and its packed values in `dense`."""
    offset = 0
    for view in map(_reduce, views):
        yield view, dense[offset : offset + view.dense_bytes].view(view.dtype).view(view.size)
        offset += round_up(view.dense_bytes)


def _reduce(view: View) -> View:
    """Shrink the expanded dimensions of `view` to size 1, so that each byte occurs once, and treat bools as bytes."""
    size = torch.Size(n if step else min(n, 1) for n, step in zip(view.size, view.stride, strict=True))
    return view._replace(size=size, dtype=torch.uint8 if view.dtype is torch.bool else view.dtype)


def round_up(size_bytes: int) -> int:
    """Round `size_bytes` up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
