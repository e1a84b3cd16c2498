"""Memory hazards that the engine's waits prevent. The engine passes the hazard to each wait that it queues.

[Note: Ordering of a copy to the host]
The copy reads its source while compute runs. An earlier copy to the device may still be reading the host block that this copy
overwrites. The source stays alive until the copy is done. Before it is freed, the compute streams wait for that copy and for
each other, because the allocator reuses freed memory for the next kernel on any of them.

[Note: Ordering of a copy to the device]
The buffer is allocated on the compute stream, so the allocator reuses its memory in the order of that stream. The copy stream
fills it. A stream that reads the buffer first waits for the copy. Before the buffer is freed, its own stream waits for the
other streams that may still use it: each stream that has read it, or the copy stream if none has.
"""

import enum


class Hazard(enum.Enum):
    """Wrong order of two memory accesses, which a wait prevents. The value describes the hazard."""

    # A copy to the host.
    SOURCE_UNWRITTEN = "the copy to the host reads its source before the kernels of a compute stream have written it"
    GATHER_UNWRITTEN = "gathering reads its source before the kernels of another compute stream have written it"
    BLOCK_STILL_READ = "the copy to the host writes a block that a copy to the device still reads"
    SOURCE_STILL_COPIED = "a kernel reuses the memory of a source that the copy to the host still reads"
    SOURCE_STILL_USED = "a kernel reuses the memory of a source that a kernel of another compute stream still uses"
    # A copy to the device.
    BUFFER_STILL_USED = "the copy to the device writes memory that kernels queued before the buffer's allocation still use"
    BLOCK_UNWRITTEN = "the copy to the device reads a host block before the copy to the host has written it"
    BUFFER_UNFILLED = "a kernel reads a buffer that the copy to the device has not filled"
    BUFFER_STILL_FILLED = "a kernel reuses the memory of an unused buffer that the copy to the device still fills"
    BUFFER_STILL_READ = "a kernel reuses the memory of a buffer that a kernel of another stream still reads"
    # Staging slots of captured graphs, see [Note: Staging].
    SLOT_UNWRITTEN = "the copy to the host reads a staging slot that the replayed forward has not written"
    SLOT_STILL_USED = "a replay or a copy writes a staging slot that another replay or copy still uses"
    SLOT_UNFILLED = "a replayed backward reads a staging slot that the copy to the device has not filled"
    GRAPH_UNJOINED = "work after a whole-step graph reads or writes memory that the graph's copies still use"
