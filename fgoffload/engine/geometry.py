"""Where in its storage a tensor lies, in bytes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

ALIGNMENT_BYTES = 512
"""What is copied starts at a multiple of this in its storage. A kernel may choose another path for another alignment of its
input, and then differ in the last bit; torch's device allocator starts blocks at multiples of 512 bytes, so a tensor that
comes back has the alignment that it left with."""

PADDING_BYTES = 16
"""Buffers are whole multiples of this, the size of the largest element, so that they can be looked at as any type."""


class View(NamedTuple):
    """One way to look at a storage. Equal views of one storage are the same bytes."""

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
    is_contiguous: bool
    """Whether the elements lie in order and without gaps. The stride of a dimension of size 1 may be any."""

    @property
    def covered_bytes(self) -> int:
        """The bytes of the storage that the view reaches, at most."""
        return min(self.dense_bytes, self.end - self.start)

    def covers(self, other: "View") -> bool:
        """Return whether this view reaches every byte that `other` can reach, as far as start and end tell."""
        return self.dense_bytes == self.end - self.start and self.start <= other.start and other.end <= self.end


def get_view(tensor: torch.Tensor) -> View:
    """Return where in its storage the strided, non-empty `tensor` lies."""
    size, stride, itemsize = tensor.size(), tensor.stride(), tensor.element_size()
    start = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():  # most are, and this runs for every saved tensor
        nbytes = tensor.numel() * itemsize
        return View(tensor.dtype, size, stride, start, start + nbytes, nbytes, is_contiguous=True)
    reach = count = 1
    for n, step in zip(size, stride, strict=True):
        reach += (n - 1) * step
        count *= n if step else 1
    return View(tensor.dtype, size, stride, start, start + reach * itemsize, count * itemsize, is_contiguous=False)


def get_stretch(tensor: torch.Tensor, *, start: int, end: int) -> torch.Tensor:
    """Return uint8 `[end - start]`: these bytes of the storage of `tensor`, not copied."""
    stretch = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return stretch.set_(tensor.untyped_storage(), start, (end - start,), (1,))


def rebuild(view: View, buffer: torch.Tensor, *, buffer_start: int) -> torch.Tensor:
    """Return the tensor that `view` describes, over a copy of its storage's bytes.

    All tensors that are rebuilt over one buffer count changes in place together, as views of one storage do.

    Args:
        view: A view of the storage that was copied.
        buffer: uint8 `[n]`, the copy, from the first byte of its own storage; n is a multiple of `PADDING_BYTES`.
        buffer_start: Which byte of the storage the first byte of `buffer` is. A multiple of `ALIGNMENT_BYTES`.
    """
    elements = buffer.view(view.dtype)
    if view.is_contiguous and view.dense_bytes == buffer.numel():
        tensor = elements.view(view.size)  # the usual case, and half of the time
        if tensor.stride() == view.stride:
            return tensor.detach()
    offset = (view.start - buffer_start) // view.dtype.itemsize
    # Detached, so that what autograd gets has no base of another type.
    return elements.as_strided(view.size, view.stride, offset).detach()


def get_gathered_bytes(views: Sequence[View]) -> int:
    """Return the bytes of all `views` packed one behind the other."""
    return sum(round_up(view.dense_bytes) for view in views)


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
    """Put what `gather` packed back into its places; the bytes in between stay as they are.

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
    """Return `view` with its expanded dimensions at size 1: the same bytes, each once."""
    size = torch.Size(n if step else min(n, 1) for n, step in zip(view.size, view.stride, strict=True))
    return view._replace(size=size)


def round_up(size_bytes: int, *, to: int = ALIGNMENT_BYTES) -> int:
    """Return the smallest multiple of `to` that is not below `size_bytes`."""
    return -(-size_bytes // to) * to
