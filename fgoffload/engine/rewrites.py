"""Detects storages that a kernel overwrote between two saves.

[Note: Writes that torch does not count]
Autograd notices a write to a saved tensor by its version. A Triton kernel, a collective or NumPy may write without changing
the version, and plain torch then gives backward whatever the memory holds. So a storage that is saved again at the same version
after its copy to the host has begun may have been written in between. For example, Liger's cross entropy overwrites the logits
with their gradient and saves them. The first re-saves at each pair of places are therefore compared with the copied bytes. If
they differ, all saves of the storage get its current bytes, now and at later re-saves of this pair. If they agree, one copy
serves all saves, and nothing is compared any more. A storage that is not saved again after the write is reloaded as copied.
"""

import torch

from fgoffload.engine.device import Device
from fgoffload.engine.geometry import gather, get_stretch
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.transfers import Transfers
from fgoffload.plan import Site

COMPARISONS = 8
"""Number of re-saves to compare for a pair of places. A comparison blocks the host and reads the tensor over the link."""


class Rewrites:
    """Remembers between which pairs of places a storage is overwritten.

    Args:
        device: Device of the copies.
        transfers: Owner of reloaded buffers.
    """

    def __init__(self, device: Device, transfers: Transfers) -> None:
        self._device = device
        self._transfers = transfers
        self._counts: dict[tuple[Site | None, Site | None], int] = {}
        self._rewriting: set[tuple[Site | None, Site | None]] = set()

    def follow(self, saved: SavedStorage, tensor: torch.Tensor, place: Place) -> None:
        """Return `saved` to its storage's current bytes if they may have been overwritten after the copy.

        Args:
            saved: Saved storage, offloaded or in flight.
            tensor: Tensor on that storage, saved at `place`.
            place: Place of the re-save.

        Streams:
            For the first re-saves at a pair of places, the host blocks until the copy to the host and the work queued on the
            current stream are done.
        """
        pair = (saved.place.site, place.site)
        if pair not in self._rewriting:
            count = self._counts.get(pair, 0)
            if count < COMPARISONS and not self._device.is_capturing():  # steps before the capture did the comparisons
                self._counts[pair] = count + 1
                if not self._is_equal(saved, tensor):
                    self._rewriting.add(pair)
        if pair in self._rewriting:
            saved.stats.recalled_bytes += saved.moved_bytes
            self._transfers.drop_reloaded(saved)
            saved.return_to(tensor)

    def _is_equal(self, saved: SavedStorage, tensor: torch.Tensor) -> bool:
        if saved.block is None or saved.block.parts[0].is_meta:
            return True  # nothing was copied, as in an estimate
        stretch = get_stretch(tensor, start=saved.start, end=saved.end)
        if saved.gathered:
            # The padding between the views has arbitrary bytes, so it is taken from the copy.
            if saved.d2h_done is not None:
                self._device.synchronize(saved.d2h_done)
            dense = torch.cat(saved.block.parts).to(tensor.device)
            gather(saved.gathered, tensor, dense)
            stretch = dense
        stretches = torch.split(stretch, [part.numel() for part in saved.block.parts])
        return all(
            self._device.is_equal(part, now, after=saved.d2h_done)
            for part, now in zip(saved.block.parts, stretches, strict=True)
        )
