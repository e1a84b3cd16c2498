"""A device that records all queued work, and finds unordered accesses to the same bytes.

Every kernel, including the engine's gather and scatter, reads its inputs and writes its outputs on the current stream. A copy
reads its source and writes its destination. Allocating and freeing memory count as writes on its owner, the current stream at
the allocation, since torch's allocator may give freed memory to the next kernel of that stream immediately. Returning host
memory to the system counts as a write by the host.

Streams, events or host waits must order two accesses to overlapping bytes if one is a write. Otherwise a real device may run
them in either order, even if this run was correct.
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

_SIZE_ONLY_OPS = ("empty", "ones", "zeros", "full", "new_")
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
    """Two conflicting accesses that a device may run in either order."""

    storage: str
    earlier: Access
    later: Access

    def __str__(self) -> str:
        return f"{self.storage}: {self.earlier} || {self.later}"


@dataclasses.dataclass(slots=True)
class _Record:
    """The accesses to one storage."""

    name: str
    reference: StorageWeakRef  # keeps the address unique, but not the memory alive
    owner: object
    nbytes: int
    is_user: bool
    accesses: list[Access] = dataclasses.field(default_factory=list)
    recorded: set[object] = dataclasses.field(default_factory=set)  # streams of `Tensor.record_stream`


class RecordingCpuDevice(ClockedCpuDevice):
    """A CPU device with stream clocks and a record of each storage. It records kernels inside `recording`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._records: dict[int, _Record] = {}
        self._events: dict[int, tuple[Work, str]] = {}
        self._is_internal = False
        self._count = 0
        self.operations: list[str] = []
        """One line for each queued operation, in order."""
        self.unordered: list[Unordered] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record kernels inside the context, including those of a backward."""
        with _Kernels(self):
            yield
        self.collect()

    def queue(self, stream: object | None = None) -> Work:
        self.collect()  # earlier frees come before this work
        return super().queue(stream)

    # Called by programs.

    def name(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Name the storage of `tensor`."""
        self._get_record(tensor).name = name
        return tensor

    def record_stream(self, tensor: torch.Tensor, stream: object) -> None:
        """Free `tensor` only after the work queued on `stream` by then, like `Tensor.record_stream`."""
        self._get_record(tensor).recorded.add(stream)

    def record_all_streams(self) -> None:
        """Call `record_stream` for all memory of the program and all streams."""
        self.collect()
        for record in self._records.values():
            if record.is_user:
                record.recorded.update(set(self._clocks) - {self.d2h_stream, self.h2d_stream})

    def turn_to(self, stream: object) -> None:
        """Make `stream` the current stream, like autograd for each node of a backward."""
        self._current = stream

    # Called by the engine.

    def record_event(self, stream, *, is_timed=False):
        event = super().record_event(stream)
        name = f"e{len(self._events)}"
        self._events[id(event)] = event, name
        self._log(stream, f"record {name}")
        return event

    def wait_event(self, stream, event, hazard):
        self.collect()
        super().wait_event(stream, event, hazard)
        self._log(stream, f"wait {self._events[id(event)][1]} ({hazard.name})")

    def is_done(self, event):
        self.collect()
        return super().is_done(event)

    def synchronize(self, event):
        self.collect()
        super().synchronize(event)
        if id(event) in self._events:
            self._log(HOST, f"wait {self._events[id(event)][1]}")

    def copy_bytes(self, *, destination, source, stream):
        with self._internal():
            super().copy_bytes(destination=destination, source=source, stream=stream)
        work = self.copies[-1]
        self._log(stream, f"copy {self._describe(source)} -> {self._describe(destination)}")
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
        record = self._get_record(buffer)
        record.is_user = False
        self._log(self._current, f"allocate {record.name} ({size_bytes} bytes)")
        self._access(buffer, "allocate", self.allocations[-1], is_write=True)
        return buffer

    def allocate_host(self, size_bytes: int) -> HostSlab:
        with self._internal():
            buffer = torch.empty(size_bytes, dtype=torch.uint8)
        key = buffer.untyped_storage()._cdata
        slabs = sum(record.owner == HOST for record in self._records.values())
        self._records[key] = _Record(f"host{slabs or ''}", _refer_to(buffer), HOST, size_bytes, is_user=False)
        self._log(HOST, f"allocate {self._records[key].name}")
        return HostSlab(buffer, free=lambda: self._free_after_copies(key))

    def _free_after_copies(self, key: int) -> None:
        for stream in (self.d2h_stream, self.h2d_stream):
            self.synchronize(super().record_event(stream))
        self._free(key)

    # Records of storages.

    def collect(self) -> None:
        """Record frees since the last call. Must be called before a clock changes."""
        for key, record in list(self._records.items()):
            if record.owner != HOST and record.reference.expired():
                self._free(key)

    def run_kernel(self, act: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Record a kernel on the current stream."""
        if self._is_internal:
            return
        if torch._C._current_graph_task_id() != -1:
            self.collect()
            for tensor in reads:
                self._order_backward_read(tensor)
        work = self.queue()
        inputs, outputs = (" ".join(dict.fromkeys(map(self._describe, tensors))) for tensors in (reads, writes))
        self._log(work.stream, f"{act} {inputs}{' ' if inputs else ''}-> {outputs}")
        for tensor in reads:
            self._access(tensor, act, work, is_write=False)
        for tensor in writes:
            self._access(tensor, act, work, is_write=True)

    def _order_backward_read(self, tensor: torch.Tensor) -> None:
        """Order the reads of a backward kernel after their writes, like autograd between streams, except engine memory."""
        record = self._get_record(tensor)
        if record.is_user:
            record.recorded.add(self._current)
            for access in record.accesses:
                if access.is_write:
                    merge(self._clocks.setdefault(self._current, {}), access.work.clock)

    def _free(self, key: int) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        work = super().queue(record.owner)
        for stream in record.recorded:
            merge(work.clock, self._clocks.get(stream, {}))
        self._log(record.owner, f"free {record.name}")
        self._check(record, Access(work, "free", is_write=True, start=0, end=record.nbytes))

    def _access(self, tensor: torch.Tensor, act: str, work: Work, *, is_write: bool) -> None:
        start, end = _get_range(tensor)
        if start < end:
            access = Access(work, act, is_write, start, end)
            record = self._get_record(tensor)
            self._check(record, access)
            record.accesses.append(access)

    def _check(self, record: _Record, later: Access) -> None:
        for earlier in record.accesses:
            is_shared = earlier.start < later.end and later.start < earlier.end
            is_conflict = is_shared and (earlier.is_write or later.is_write)
            if is_conflict and not earlier.work.is_before(later.work):
                self.unordered.append(Unordered(record.name, earlier, later))

    def _get_record(self, tensor: torch.Tensor) -> _Record:
        storage = tensor.untyped_storage()
        record = self._records.get(storage._cdata)
        if record is None:
            record = _Record(f"t{self._count}", _refer_to(tensor), self._current, storage.nbytes(), is_user=True)
            self._records[storage._cdata] = record
            self._count += 1
        return record

    def _describe(self, tensor: torch.Tensor) -> str:
        record, (start, end) = self._get_record(tensor), _get_range(tensor)
        return record.name if (start, end) == (0, record.nbytes) else f"{record.name}[{start}:{end}]"

    def _log(self, stream: object, text: str) -> None:
        self.operations.append(f"{getattr(stream, 'name', stream):<8} {text}")

    @contextlib.contextmanager
    def _internal(self) -> Iterator[None]:
        self._is_internal, before = True, self._is_internal
        try:
            yield
        finally:
            self._is_internal = before


class _Kernels(TorchDispatchMode):
    """Reports each kernel to a device. Ops that only create views are not kernels."""

    def __init__(self, device: RecordingCpuDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name == "aten::set_":
            return func(*args, **kwargs)  # a view of existing memory
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
            self._device.run_kernel(name, [] if name.startswith(_SIZE_ONLY_OPS) else inputs, writes)
        return results


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and leaf.untyped_storage().nbytes()]


def _get_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes of its storage that `tensor` spans, including gaps."""
    if tensor.numel() == 0:
        return 0, 0
    start = int(tensor.storage_offset())
    reach = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return start * tensor.element_size(), (start + reach + 1) * tensor.element_size()


def _refer_to(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def leaves_out_hazard(hazard: object) -> Any:
    return lambda wait: wait.hazard is hazard


def leaves_out_site(site: Wait) -> Any:
    return lambda wait: (wait.hazard, wait.site) == (site.hazard, site.site)
