"""Buffers of modules stay on the device.

[Note: Buffers stay]
Batch norm writes its running statistics without counting a version, so a copy on the host of an older graph would pass for what
they are now. Whatever autograd saves of a buffer stays, and is then what it is without offload. Buffers are small, and would
hold their memory anyway.

They are looked for at the outermost module of each forward, and not once: `to`, `register_buffer` and `functional_call` put
other tensors in their place, and a copy of a model has its own. A walk costs 0.7 us for each module of a tree, where calling
one costs ten or more; only a buffer that is new is told to the engine. One that is made in the middle of a forward counts
from the next.
"""

import weakref
from collections.abc import Callable

import torch

_Known = dict[int, tuple["weakref.ref[torch.Tensor]", int]]


class BufferWatch:
    """Knows the buffers that were there the last time."""

    def __init__(self) -> None:
        # By the id of the tensor: the tensor, and where its bytes lie, since `buffer.data` may be given others.
        self._known: _Known = {}

    def mark_new(self, module: torch.nn.Module, mark: Callable[[list[torch.Tensor]], None]) -> None:
        """Call `mark` with the buffers in the tree of `module` that were not there, or lay elsewhere, at the last call."""
        known: _Known = {}
        new = []
        for buffer in module.buffers():
            if type(buffer) is not torch.Tensor:
                continue  # the engine leaves subclasses alone
            try:
                address = buffer.data_ptr()
            except RuntimeError:
                continue  # no storage of its own: a wrapper of `torch.func`, or sparse
            entry = self._known.get(id(buffer))
            if entry is None or entry[0]() is not buffer or entry[1] != address:
                entry = weakref.ref(buffer), address
                new.append(buffer)
            known[id(buffer)] = entry
        if new:
            mark(new)
        self._known = known  # last: a second thread must not take for marked what is not yet
