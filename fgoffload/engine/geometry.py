"""Describes where tensors lie in their storages, and packs and rebuilds them."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

ALIGNMENT_BYTES = 512
"""Bytes to which the start of a copied range is aligned, as torch's device allocator aligns blocks. A reloaded tensor with
another alignment could use another kernel, whose results differ in the last bit."""


class View(NamedTuple):
    """View of a storage. Equal views of one storage have the same bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    """Elements."""
    start: int
    """Bytes from the start of the storage."""
    end: int
    """Bytes from the start of the storage to the end of the view's last byte."""
    dense_bytes: int
    """Bytes of the view's elements when packed. Elements of an expanded dimension count once."""
    covered_bytes: int
    """Upper bound of the storage's bytes that the view reaches."""
    is_contiguous: bool
    """Whether the elements lie in order and without gaps. A dimension of size 1 may have any stride."""

    def covers(self, other: "View") -> bool:
        """Return whether this view has no gaps and covers `other` from start to end."""
        return self.dense_bytes == self.end - self.start and self.start <= other.start and other.end <= self.end


def get_view(tensor: torch.Tensor) -> View:
    """Return the location and layout of the strided, non-empty `tensor` in its storage."""
    return _make_view(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@functools.lru_cache(maxsize=4096)  # steps save the same views, and this runs for every saved tensor
def _make_view(dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> View:
    start = offset * dtype.itemsize
    reach = count = 1
    is_contiguous = True
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        # `count` has the elements of the inner dimensions here, which is this dimension's stride without gaps.
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
    """Return a range of the bytes of the storage of `tensor` as uint8 `[end - start]`, without a copy."""
    target = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return target.set_(tensor.untyped_storage(), start, (end - start,), (1,))


def rebuild(view: View, buffer: torch.Tensor, *, buffer_start: int) -> torch.Tensor:
    """Return the tensor that `view` describes, over `buffer`, a copy of its storage's bytes.

    Tensors over one buffer share its version counter, as views of one storage do. `buffer` is contiguous, of any type, and at
    the start of its own storage. `buffer_start`, its offset in bytes in the saved storage, is a multiple of `ALIGNMENT_BYTES`.
    """
    itemsize = view.dtype.itemsize
    offset = (view.start - buffer_start) // itemsize
    if view.dtype is not buffer.dtype:
        octets = buffer.as_strided((buffer.nbytes // buffer.itemsize,), (1,)).view(torch.uint8)
        buffer = octets[: buffer.nbytes // itemsize * itemsize].view(view.dtype)
    # Detached, so that the tensor has no base of another type.
    return buffer.as_strided(view.size, view.stride, offset).detach()


def get_gathered_bytes(views: Sequence[View]) -> int:
    """Return the size in bytes of all `views` packed, alignment included."""
    return sum(round_up(view.dense_bytes) for view in views)


def choose_gathered(views: Iterable[View], *, size_bytes: int) -> tuple[View, ...]:
    """Return distinct `views` in packing order if they take less than half of `size_bytes`, otherwise none."""
    packed = tuple(sorted(views, key=lambda view: (view.start, view.end)))
    return packed if 2 * get_gathered_bytes(packed) < size_bytes else ()


def gather(views: Sequence[View], tensor: torch.Tensor, dense: torch.Tensor) -> None:
    """Pack `views`, in packing order, of the storage of `tensor` into `dense`, on the current stream.

    `dense` is uint8 `[get_gathered_bytes(views)]`.
    """
    for view, values in _pair(views, dense):
        values.copy_(_look(view, tensor, start=0))


def scatter(views: Sequence[View], dense: torch.Tensor, target: torch.Tensor, *, target_start: int) -> None:
    """Unpack the views that `gather` packed, on the current stream. The bytes in between stay unchanged.

    All views lie in `target`, uint8 `[n]`, which begins at byte `target_start` of the saved storage.
    """
    for view, values in _pair(views, dense):
        _look(view, target, start=target_start).copy_(values)


def _look(view: View, tensor: torch.Tensor, *, start: int) -> torch.Tensor:
    offset = (view.start - start) // view.dtype.itemsize
    return torch.empty(0, dtype=view.dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, view.size, view.stride)


def _pair(views: Sequence[View], dense: torch.Tensor) -> Iterator[tuple[View, torch.Tensor]]:
    """Yield each view, without repeated elements, and its values in `dense`."""
    offset = 0
    for view in map(_reduce, views):
        yield view, dense[offset : offset + view.dense_bytes].view(view.dtype).view(view.size)
        offset += round_up(view.dense_bytes)


def _reduce(view: View) -> View:
    """Return `view` with expanded dimensions of size 1 and bools as bytes, so that it has each byte once."""
    size = torch.Size(n if step else min(n, 1) for n, step in zip(view.size, view.stride, strict=True))
    return view._replace(size=size, dtype=torch.uint8 if view.dtype is torch.bool else view.dtype)


def round_up(size_bytes: int) -> int:
    """Round `size_bytes` up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
