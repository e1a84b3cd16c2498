"""Writes small tensors to the host with kernels, to bypass the copy engine, which offload keeps busy."""

import collections
import dataclasses

import torch


def write_to_host(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of `tensor` in pinned memory, written by a kernel instead of the copy engine.

    Returns None for a CPU tensor, or if the device maps the memory to another address.

    Streams:
        The write is queued on the current stream. The host does not block. It may read the copy after the write has finished.

    Lifetime:
        The caller must hold the copy until the write has finished.
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
    """Pages of pinned memory for small tensors that kernels write to the host. Each tensor gets the next piece of a page.

    The pages are for tensors that every layer writes while the device waits for the host. Pinning memory, mapping it and
    recording an event for each tensor would take the host several times as long as the kernel launch.
    """

    def __init__(self) -> None:
        self._pages: dict[tuple[torch.dtype, torch.device], _Page] = {}
        """Current page, by type and device."""
        self._full: collections.deque[tuple[torch.Tensor, list[torch.cuda.Event]]] = collections.deque()
        """Full pages, with events that show when kernels have written them. PyTorch's pinned-memory allocator does not track
        these kernels, so it would reuse the pages too early."""

    def write(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of `tensor` on the host, as `write_to_host` does.

        Lifetime:
            This object holds memory that kernels still write to. The caller must hold the copy while reading it.
        """
        if not tensor.is_cuda:
            return None
        count = tensor.numel()
        key = (tensor.dtype, tensor.device)
        page = self._pages.get(key)
        if page is None or page.begin + count > page.host.numel():
            page = self._begin_page(key, count)
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

    def _begin_page(self, key: tuple[torch.dtype, torch.device], count: int) -> "_Page | None":
        """Allocate a page for at least `count` elements. Return it, or None if the device maps it to another address."""
        while self._full and all(event.query() for event in self._full[0][1]):  # type: ignore[no-untyped-call]
            self._full.popleft()
        full = self._pages.pop(key, None)
        if full is not None:
            self._full.append((full.host, [stream.record_event() for stream in full.streams]))
        dtype, device = key
        host = torch.empty(max(_PAGE_NUMEL, count), dtype=dtype, device="cpu", pin_memory=True)
        mapped = _map(host, device)
        if mapped is None:
            return None
        page = self._pages[key] = _Page(host, mapped)
        return page


def read_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` that the host may read now, or `tensor` itself if `write_to_host` returns None.

    Streams:
        The host waits for the current stream, but not for copies on other streams.
    """
    host = write_to_host(tensor)
    if host is None:
        return tensor
    torch.cuda.current_stream().synchronize()
    return host


_PAGE_NUMEL = 8192
"""Elements per page: 64 KiB of integers hold the token counts of 16 experts for a few hundred layers."""

_PIECE_NUMEL = 16
"""Alignment of pieces, in elements. It prevents the host from reading a cache line that the device still writes to."""


@dataclasses.dataclass(slots=True)
class _Page:
    """Page of pinned memory that tensors fill from the front."""

    host: torch.Tensor
    mapped: torch.Tensor
    """View of the same memory on the device."""
    begin: int = 0
    """First free element."""
    streams: set[torch.cuda.Stream] = dataclasses.field(default_factory=set)
    """Streams whose kernels write to the page."""


def _map(host: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Return a view of pinned memory on `device`, or None if `device` maps the memory to another address."""
    mapped = torch.as_tensor(_MappedMemory(host), device=device)
    # If the memory was pinned for another device, torch has copied it to this one.
    return mapped if mapped.data_ptr() == host.data_ptr() else None


def _write(tensor: torch.Tensor, mapped: torch.Tensor) -> None:
    # An arithmetic op always runs as a kernel. For a plain copy, the driver may use the copy engine.
    torch.add(tensor, 0, out=mapped)


class _MappedMemory:
    """Exposes pinned host memory to the device at its host address, which unified addressing makes valid on the device."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": f"<i{host.element_size()}",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
