"""Location and layout of tensors in their storage, in bytes."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

ALIGNMENT_BYTES = 512
"""Copied ranges start at a multiple of this in their storage. A kernel may take another path for another alignment and differ
in the last bit. torch's device allocator aligns blocks to 512 bytes, so a reloaded tensor keeps its alignment."""


class View(NamedTuple):
    """One view of a storage. Equal views of one storage have the same bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    """Elements."""
    start: int
    """Bytes from the start of the storage."""
    end: int
    """Bytes from the start of the storage to behind the last byte that the view can reach."""
    dense_bytes: int
    """The bytes of the view's elements packed one behind the other; those of an expanded dimension once."""
    covered_bytes: int
    """The bytes of the storage that the view reaches, at most."""
    is_contiguous: bool
    """Whether the elements lie in order and without gaps. The stride of a dimension of size 1 may be any."""

    def covers(self, other: "View") -> bool:
        """Return whether this view reaches every byte that `other` can reach, as far as start and end tell."""
        return self.dense_bytes == self.end - self.start and self.start <= other.start and other.end <= self.end


def get_view(tensor: torch.Tensor) -> View:
    """Return where in its storage the strided, non-empty `tensor` lies."""
    return _make_view(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@functools.lru_cache(maxsize=4096)  # a step saves the same views as the one before, and this runs for every saved tensor
def _make_view(dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> View:
    start = offset * dtype.itemsize
    reach = count = 1
    is_contiguous = True
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        # Before this dimension is counted in, `count` are the elements of those behind it: the step of one without gaps.
        is_contiguous &= n == 1 or step == count
        reach += (n - 1) * step
        count *= n if step else 1
    reach_bytes, dense_bytes = reach * dtype.itemsize, count * dtype.itemsize
    return View(dtype, size, stride, start, start + reach_bytes, dense_bytes, min(reach_bytes, dense_bytes), is_contiguous)


def get_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8 `[n]`: the bytes of the contiguous `tensor`, not copied."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return get_stretch(tensor, start=start, end=start + tensor.numel() * tensor.element_size())


def get_stretch(tensor: torch.Tensor, *, start: int, end: int) -> torch.Tensor:
    """Return uint8 `[end - start]`: these bytes of the storage of `tensor`, not copied."""
    stretch = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return stretch.set_(tensor.untyped_storage(), start, (end - start,), (1,))


def rebuild(view: View, buffer: torch.Tensor, *, buffer_start: int) -> torch.Tensor:
    """Return the tensor that `view` describes, over a copy of its storage's bytes.

    All tensors that are rebuilt over one buffer count changes in place together, as views of one storage do.

    Args:
        view: A view of the storage that was copied.
        buffer: The copy, contiguous, of any type, from the first byte of its own storage.
        buffer_start: Which byte of the storage the first byte of `buffer` is. A multiple of `ALIGNMENT_BYTES`.
    """
    itemsize = view.dtype.itemsize
    offset = (view.start - buffer_start) // itemsize
    if view.dtype is not buffer.dtype:
        octets = buffer.as_strided((buffer.nbytes // buffer.itemsize,), (1,)).view(torch.uint8)
        buffer = octets[: buffer.nbytes // itemsize * itemsize].view(view.dtype)
    # Detached, so that what autograd gets has no base of another type.
    return buffer.as_strided(view.size, view.stride, offset).detach()


def get_gathered_bytes(views: Sequence[View]) -> int:
    """Return the bytes of all `views` packed one behind the other."""
    return sum(round_up(view.dense_bytes) for view in views)


def choose_gathered(views: Iterable[View], *, size_bytes: int) -> tuple[View, ...]:
    """Return `views` in packing order if packed they are less than half of their range, else none.

    Args:
        views: Of one storage, each once.
        size_bytes: Of the stretch.
    """
    packed = tuple(sorted(views, key=lambda view: (view.start, view.end)))
    return packed if 2 * get_gathered_bytes(packed) < size_bytes else ()


def gather(views: Sequence[View], tensor: torch.Tensor, dense: torch.Tensor) -> None:
    """Pack `views` of the storage of `tensor` into `dense`.

    Args:
        views: In packing order.
        tensor: Any tensor on the storage.
        dense: uint8 `[get_gathered_bytes(views)]`, on the same device.

    Streams:
        Runs on the current stream.
    """
    for view, values in _pair(views, dense):
        values.copy_(_look(view, tensor, start=0))


def scatter(views: Sequence[View], dense: torch.Tensor, stretch: torch.Tensor, *, stretch_start: int) -> None:
    """Scatter what `gather` packed; the bytes in between are unchanged.

    Args:
        views: In packing order.
        dense: uint8 `[get_gathered_bytes(views)]`.
        stretch: uint8 `[n]`, on the same device, in which all views lie.
        stretch_start: Which byte of the storage the first byte of `stretch` is.

    Streams:
        Runs on the current stream.
    """
    for view, values in _pair(views, dense):
        _look(view, stretch, start=stretch_start).copy_(values)


def _look(view: View, tensor: torch.Tensor, *, start: int) -> torch.Tensor:
    """Return `view` over the storage of `tensor`, whose first byte is byte `start` of the storage that was saved."""
    offset = (view.start - start) // view.dtype.itemsize
    return torch.empty(0, dtype=view.dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, view.size, view.stride)


def _pair(views: Sequence[View], dense: torch.Tensor) -> Iterator[tuple[View, torch.Tensor]]:
    """Yield each view without its repeats, and the contiguous tensor of its values in `dense`."""
    offset = 0
    for view in map(_reduce, views):
        yield view, dense[offset : offset + view.dense_bytes].view(view.dtype).view(view.size)
        offset += round_up(view.dense_bytes)


def _reduce(view: View) -> View:
    """Return `view` with its expanded dimensions at size 1, and bools as bytes: the same bytes, each once and as they are."""
    size = torch.Size(n if step else min(n, 1) for n, step in zip(view.size, view.stride, strict=True))
    return view._replace(size=size, dtype=torch.uint8 if view.dtype is torch.bool else view.dtype)


def round_up(size_bytes: int, *, to: int = ALIGNMENT_BYTES) -> int:
    """Return the smallest multiple of `to` that is not below `size_bytes`."""
    return -(-size_bytes // to) * to
