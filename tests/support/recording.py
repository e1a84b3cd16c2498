"""A device that records all queued work, and finds unordered accesses to the same bytes.

Every kernel, including the engine's gather and scatter, reads its inputs and writes its outputs on the current stream. A copy
reads its source and writes its destination. Allocating and freeing memory count as writes of its owner, the stream that was
current at the allocation: torch's allocator may give freed memory to the next kernel of that stream at once. Returning host
memory to the system counts as a write of the host.

If two accesses touch overlapping bytes and one is a write, streams, events or host waits must order them. Otherwise a real
device may run them in either order, even if this run was correct.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fgoffload.engine import HostSlab
from support.clocks import ClockedCpuDevice, Wait, Work, merge

HOST = "host"

_ONLY_LOOK_AT_SIZES = ("empty", "ones", "zeros", "full", "new_")
"""Prefixes of ops that do not read the bytes of their inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Bytes `[start, end)` of a storage, read or written."""

    work: Work
    act: str
    is_write: bool
    start: int
    end: int

    def __str__(self) -> str:
        verb = "writes" if self.is_write else "reads"
        return f"{self.act} on {self.work.stream} {verb} [{self.start}:{self.end}]"


class Unordered(NamedTuple):
    """Two accesses that conflict, and that a device may run in either order."""

    storage: str
    earlier: Access
    later: Access

    def __str__(self) -> str:
        return f"{self.storage}: {self.earlier} || {self.later}"


@dataclasses.dataclass(slots=True)
class _Book:
    """Events of one storage."""

    name: str
    reference: StorageWeakRef  # keeps the address from being used again, and not the memory
    owner: object
    nbytes: int
    is_users: bool
    accesses: list[Access] = dataclasses.field(default_factory=list)
    recorded: set[object] = dataclasses.field(default_factory=set)  # as Tensor.record_stream


class RecordingCpuDevice(ClockedCpuDevice):
    """The CPU with streams that have clocks, and a book for each storage. Kernels count inside of `recording`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._books: dict[int, _Book] = {}
        self._events: dict[int, tuple[Work, str]] = {}
        self._is_internal = False
        self._count = 0
        self.operations: list[str] = []
        """What was queued, in order, one line each."""
        self.unordered: list[Unordered] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Count kernels in the body, including those of a backward."""
        with _Kernels(self):
            yield
        self.collect()

    def queue(self, stream: object | None = None) -> Work:
        self.collect()  # what was freed before this was freed in the order of before
        return super().queue(stream)

    # What a program says.

    def name(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Call the storage of `tensor` by `name`."""
        self._get_book(tensor).name = name
        return tensor

    def record_stream(self, tensor: torch.Tensor, stream: object) -> None:
        """Let `tensor` be freed only when `stream` has done what is queued there by then, as `Tensor.record_stream`."""
        self._get_book(tensor).recorded.add(stream)

    def record_all_streams(self) -> None:
        """Say so of all memory that is not the engine's: from here on the program looks after its own."""
        self.collect()
        for book in self._books.values():
            if book.is_users:
                book.recorded.update(set(self._clocks) - {self.d2h_stream, self.h2d_stream})

    def turn_to(self, stream: object) -> None:
        """Let `stream` be the current one from here on, as autograd does for each node of a backward."""
        self._current = stream

    # What the engine asks for.

    def record_event(self, stream, *, is_timed=False):
        event = super().record_event(stream)
        name = f"e{len(self._events)}"
        self._events[id(event)] = event, name
        self._note(stream, f"record {name}")
        return event

    def wait_event(self, stream, event, hazard):
        self.collect()
        super().wait_event(stream, event, hazard)
        self._note(stream, f"wait {self._events[id(event)][1]} ({hazard.name})")

    def is_done(self, event):
        self.collect()
        return super().is_done(event)

    def synchronize(self, event):
        self.collect()
        super().synchronize(event)
        if id(event) in self._events:
            self._note(HOST, f"wait {self._events[id(event)][1]}")

    def copy_bytes(self, *, destination, source, stream):
        with self._internal():
            super().copy_bytes(destination=destination, source=source, stream=stream)
        work = self.copies[-1]
        self._note(stream, f"copy {self._say(source)} -> {self._say(destination)}")
        self._access(source, "copy", work, is_write=False)
        self._access(destination, "copy", work, is_write=True)

    def is_equal(self, on_host: torch.Tensor, tensor: torch.Tensor, *, after: object) -> bool:
        self.run_kernel("compare", [tensor], [])
        self.synchronize(self.record_event(self._current))
        with self._internal():
            return super().is_equal(on_host, tensor, after=after)

    def allocate_device(self, size_bytes: int) -> torch.Tensor:
        with self._internal():
            buffer = super().allocate_device(size_bytes)
        book = self._get_book(buffer)
        book.is_users = False
        self._note(self._current, f"allocate {book.name} ({size_bytes} bytes)")
        self._access(buffer, "allocate", self.allocations[-1], is_write=True)
        return buffer

    def allocate_host(self, size_bytes: int) -> HostSlab:
        with self._internal():
            buffer = torch.empty(size_bytes, dtype=torch.uint8)
        key = buffer.untyped_storage()._cdata
        slabs = sum(book.owner == HOST for book in self._books.values())
        self._books[key] = _Book(f"host{slabs or ''}", _refer(buffer), HOST, size_bytes, is_users=False)
        self._note(HOST, f"allocate {self._books[key].name}")
        return HostSlab(buffer, free=lambda: self._free_after_copies(key))

    def _free_after_copies(self, key: int) -> None:
        for stream in (self.d2h_stream, self.h2d_stream):
            self.synchronize(super().record_event(stream))
        self._free(key)

    # The books.

    def collect(self) -> None:
        """Find out what was freed since the last call. Anything that changes a clock calls this first."""
        for key, book in list(self._books.items()):
            if book.owner != HOST and book.reference.expired():
                self._free(key)

    def run_kernel(self, act: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Take note of a kernel on the current stream."""
        if self._is_internal:
            return
        if torch._C._current_graph_task_id() != -1:
            self.collect()
            for tensor in reads:
                self._hand_over(tensor)
        work = self.queue()
        inputs, outputs = (" ".join(dict.fromkeys(map(self._say, tensors))) for tensors in (reads, writes))
        self._note(work.stream, f"{act} {inputs}{' ' if inputs else ''}-> {outputs}")
        for tensor in reads:
            self._access(tensor, act, work, is_write=False)
        for tensor in writes:
            self._access(tensor, act, work, is_write=True)

    def _hand_over(self, tensor: torch.Tensor) -> None:
        """Order what a kernel of a backward reads, and is not the engine's, as autograd does where streams differ."""
        book = self._get_book(tensor)
        if book.is_users:
            book.recorded.add(self._current)
            for access in book.accesses:
                if access.is_write:
                    merge(self._clocks.setdefault(self._current, {}), access.work.clock)

    def _free(self, key: int) -> None:
        book = self._books.pop(key, None)
        if book is None:
            return
        work = super().queue(book.owner)
        for stream in book.recorded:
            merge(work.clock, self._clocks.get(stream, {}))
        self._note(book.owner, f"free {book.name}")
        self._check(book, Access(work, "free", is_write=True, start=0, end=book.nbytes))

    def _access(self, tensor: torch.Tensor, act: str, work: Work, *, is_write: bool) -> None:
        start, end = _get_range(tensor)
        if start < end:
            access = Access(work, act, is_write, start, end)
            book = self._get_book(tensor)
            self._check(book, access)
            book.accesses.append(access)

    def _check(self, book: _Book, later: Access) -> None:
        for earlier in book.accesses:
            is_shared = earlier.start < later.end and later.start < earlier.end
            does_conflict = is_shared and (earlier.is_write or later.is_write)
            if does_conflict and not earlier.work.is_before(later.work):
                self.unordered.append(Unordered(book.name, earlier, later))

    def _get_book(self, tensor: torch.Tensor) -> _Book:
        storage = tensor.untyped_storage()
        book = self._books.get(storage._cdata)
        if book is None:
            book = _Book(f"t{self._count}", _refer(tensor), self._current, storage.nbytes(), is_users=True)
            self._books[storage._cdata] = book
            self._count += 1
        return book

    def _say(self, tensor: torch.Tensor) -> str:
        book, (start, end) = self._get_book(tensor), _get_range(tensor)
        return book.name if (start, end) == (0, book.nbytes) else f"{book.name}[{start}:{end}]"

    def _note(self, stream: object, text: str) -> None:
        self.operations.append(f"{getattr(stream, 'name', stream):<8} {text}")

    @contextlib.contextmanager
    def _internal(self) -> Iterator[None]:
        self._is_internal, before = True, self._is_internal
        try:
            yield
        finally:
            self._is_internal = before


class _Kernels(TorchDispatchMode):
    """Tells a device of each kernel; ops that only look at memory in another way are none."""

    def __init__(self, device: RecordingCpuDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name == "aten::set_":
            return func(*args, **kwargs)  # looks at memory that was there before
        inputs = _list_tensors((args, kwargs))
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        results = func(*args, **kwargs)
        outputs = _list_tensors(results)
        written = [
            kwargs.get(argument.name, args[position] if position < len(args) else None)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        name = func._schema.name.removeprefix("aten::")
        writes = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known] + _list_tensors(written)
        if writes:
            self._device.run_kernel(name, [] if name.startswith(_ONLY_LOOK_AT_SIZES) else inputs, writes)
        return results


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and leaf.untyped_storage().nbytes()]


def _get_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return which bytes of its storage `tensor` reaches, those in between included."""
    if tensor.numel() == 0:
        return 0, 0
    start = int(tensor.storage_offset())
    reach = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return start * tensor.element_size(), (start + reach + 1) * tensor.element_size()


def _refer(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def leaves_out_hazard(hazard: object) -> Any:
    return lambda wait: wait.hazard is hazard


def leaves_out_site(site: Wait) -> Any:
    return lambda wait: (wait.hazard, wait.site) == (site.hazard, site.site)
