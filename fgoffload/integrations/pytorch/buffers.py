"""Keeps the buffers of modules on the device.

[Note: Buffers stay]
Batch norm updates its running statistics without a new version, so an old graph's copy on the host would
pass for the current values. Saved buffers therefore stay on the device, as without offload. They are small, and the module
would hold their memory anyway.

Buffers are collected at the outermost module of each forward, since `to`, `register_buffer` and `functional_call` replace
them, and copies of a model have their own. A walk costs 0.7 us per module, and calling a module costs ten or more. Only new
buffers are passed to the engine. A buffer created during a forward counts from the next forward on.
"""

import weakref
from collections.abc import Callable

import torch

_Known = dict[int, tuple["weakref.ref[torch.Tensor]", int]]


class BufferWatch:
    """Remembers the buffers of the last call, to find new ones."""

    def __init__(self) -> None:
        # Tensor and data pointer by the tensor's id. The pointer is there since `buffer.data` may be replaced.
        self._known: _Known = {}

    def mark_new(self, module: torch.nn.Module, mark: Callable[[list[torch.Tensor]], None]) -> None:
        """Call `mark` with the buffers below `module` that are new or have moved since the last call."""
        known: _Known = {}
        new = []
        for buffer in module.buffers():
            if type(buffer) is not torch.Tensor:
                continue  # the engine keeps subclasses on the device anyway
            try:
                address = buffer.data_ptr()
            except RuntimeError:
                continue  # without its own storage: a wrapper of `torch.func`, or sparse
            entry = self._known.get(id(buffer))
            if entry is None or entry[0]() is not buffer or entry[1] != address:
                entry = weakref.ref(buffer), address
                new.append(buffer)
            known[id(buffer)] = entry
        if new:
            mark(new)
        self._known = known  # last, so that a second thread does not see a buffer as marked too early
