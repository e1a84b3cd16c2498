"""Hazards that the engine's waits prevent. Every wait that the engine queues names one.

[Note: Ordering of a copy to the host]
The copy reads its source while compute runs, and writes a host block that an earlier copy to the device may still read. The
source stays alive until the copy is done. Before the source is dropped, the compute streams wait for that copy and for each
other, since the allocator gives freed memory to the next kernel of one of them.

[Note: Ordering of a copy to the device]
The buffer is allocated on the compute stream, so that the allocator reuses it in that stream's order. It is filled on the copy
stream. A stream that takes the bytes waits for the copy. A buffer that was not taken, or was taken on another stream, is
dropped only after its own stream waits for all streams that may still use it.
"""

import enum


class Hazard(enum.Enum):
    """A memory access that is too early or too late without the wait. The value describes it."""

    # A copy to the host.
    SOURCE_UNWRITTEN = "the copy to the host reads its source before the kernels of a compute stream have written it"
    GATHER_UNWRITTEN = "gathering reads its source before the kernels of another compute stream have written it"
    BLOCK_STILL_READ = "the copy to the host writes a block that a copy to the device still reads"
    SOURCE_STILL_COPIED = "a kernel gets the memory of a source that the copy to the host still reads"
    SOURCE_STILL_USED = "a kernel gets the memory of a source that a kernel of another compute stream still uses"
    # A copy to the device.
    BUFFER_STILL_USED = "the copy to the device writes memory that kernels queued before the buffer's allocation still use"
    BLOCK_UNWRITTEN = "the copy to the device reads a block that its own copy to the host has not written"
    BUFFER_UNFILLED = "a kernel takes a buffer that the copy to the device has not filled"
    BUFFER_STILL_FILLED = "a kernel gets the memory of a buffer that nobody took and that the copy to the device still fills"
    BUFFER_STILL_READ = "a kernel gets the memory of a buffer that a kernel of another stream still reads"
    # Staging slots of captured graphs, see [Note: Staging].
    SLOT_UNWRITTEN = "the copy to the host reads a staging slot that the replayed forward has not written"
    SLOT_STILL_USED = "a replay or a copy writes a staging slot that another one still uses"
    SLOT_UNFILLED = "a replayed backward reads a staging slot that the copy to the device has not filled"
    GRAPH_UNJOINED = "a whole-step graph ends, and later work reads or writes memory that its copies still use"
