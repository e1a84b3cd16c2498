"""Bytes that the host waits for, written by a kernel: around the copy engine, which offload keeps busy."""

import collections

import torch


def write_to_host(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of `tensor` on the host, written by a kernel and not by the copy engine.

    Streams:
        Queued on the current stream. The host does not block: it may read the copy when that stream has come so far.

    Lifetime:
        The caller holds the copy until then.

    Returns:
        Pinned memory, of the same shape and type; None where the device does not see it under its address, or is a CPU.
    """
    if not tensor.is_cuda:
        return None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    if tensor.numel():
        mapped = _map(host, tensor.device)
        if mapped is None:
            return None
        _write(tensor, mapped)
    return host


class HostPages:
    """Pinned memory in pages, of which each small tensor that a kernel writes to the host gets the next piece.

    For what is written in every layer, where the device waits for the host: to pin memory for each tensor, to map it and to
    record an event behind it takes the host several times as long as the kernel's launch.
    """

    def __init__(self) -> None:
        self._pages: dict[tuple[torch.dtype, torch.device], _Page] = {}
        """By type and device: the page that is written now."""
        self._turned: collections.deque[tuple[torch.Tensor, list[torch.cuda.Event]]] = collections.deque()
        """Pages that are full, and what tells that kernels have written them: the allocator of pinned memory does not know of
        those, and would hand it out again."""

    def write(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of `tensor` on the host, as `write_to_host` does.

        Lifetime:
            What kernels still write to lives here. The caller holds the copy for as long as it wants to read it.
        """
        if not tensor.is_cuda:
            return None
        count = tensor.numel()
        key = (tensor.dtype, tensor.device)
        page = self._pages.get(key)
        if page is None or page.begin + count > page.host.numel():
            page = self._turn(key, count)
            if page is None:
                return None
        begin, end = page.begin, page.begin + count
        page.begin = -(-end // _PIECE_NUMEL) * _PIECE_NUMEL
        host, mapped = page.host[begin:end], page.mapped[begin:end]
        if tensor.dim() != 1:
            host, mapped = host.view(tensor.shape), mapped.view(tensor.shape)
        if count:
            page.streams.add(torch.cuda.current_stream(tensor.device))
            _write(tensor, mapped)
        return host

    def _turn(self, key: tuple[torch.dtype, torch.device], count: int) -> "_Page | None":
        """Begin a page that has room for `count` elements; None where the device does not see it under its address."""
        while self._turned and all(event.query() for event in self._turned[0][1]):  # type: ignore[no-untyped-call]
            self._turned.popleft()
        full = self._pages.pop(key, None)
        if full is not None:
            self._turned.append((full.host, [stream.record_event() for stream in full.streams]))
        dtype, device = key
        host = torch.empty(max(_PAGE_NUMEL, count), dtype=dtype, device="cpu", pin_memory=True)
        mapped = _map(host, device)
        if mapped is None:
            return None
        page = self._pages[key] = _Page(host, mapped)
        return page


def read_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` that the host may read now, or `tensor` itself where `write_to_host` makes none.

    Streams:
        The host waits for the current stream, and for no copy that is under way beside it.
    """
    host = write_to_host(tensor)
    if host is None:
        return tensor
    torch.cuda.current_stream().synchronize()
    return host


_PAGE_NUMEL = 8192
"""Elements of a page: 64 KiB of whole numbers are the tokens of 16 experts for a few hundred layers."""

_PIECE_NUMEL = 16
"""Elements. Pieces begin at multiples of it: so the host does not read a cache line that the device still writes to."""


class _Page:
    """A page that is written now."""

    __slots__ = ("begin", "host", "mapped", "streams")

    def __init__(self, host: torch.Tensor, mapped: torch.Tensor) -> None:
        self.host = host
        self.mapped = mapped
        """The same memory, as the device sees it."""
        self.begin = 0
        """Elements that are given away."""
        self.streams: set[torch.cuda.Stream] = set()
        """On which kernels write to it."""


def _map(host: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Return pinned memory as `device` sees it, or None where it does so under another address."""
    mapped = torch.as_tensor(_MappedMemory(host), device=device)
    # Pinned for another device: torch has made a copy on this one.
    return mapped if mapped.data_ptr() == host.data_ptr() else None


def _write(tensor: torch.Tensor, mapped: torch.Tensor) -> None:
    # An op of arithmetic, since torch hands a plain copy to the driver, which may take the copy engine for it.
    torch.add(tensor, 0, out=mapped)


class _MappedMemory:
    """Pinned host memory under the address at which the device sees it: the same one, by unified addressing."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": f"<i{host.element_size()}",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
