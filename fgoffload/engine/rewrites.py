"""Detects storages that a kernel overwrote between two saves.

[Note: Writes that torch does not count]
Autograd notices a write to a saved tensor by its version. A Triton kernel, a collective, or NumPy writes without counting one,
and plain torch then gives backward whatever the memory holds. A storage whose copy to the host has begun, and that is saved
again at the same version, may have been written in between: Liger's cross entropy puts the gradient of the logits over the
logits and saves them. So the first re-saves at each pair of places are compared with what was copied. Where they differ, the
storage is taken as it is now, for all who saved it, there and from then on; where they agree, it moves once for all, and
nothing is compared any more. A storage that is not saved again after the write comes back as it was when it was copied.
"""

import torch

from fgoffload.engine.device import Device
from fgoffload.engine.geometry import gather, get_stretch
from fgoffload.engine.place import Place
from fgoffload.engine.saved import SavedStorage
from fgoffload.engine.transfers import Transfers
from fgoffload.plan import Site

COMPARISONS = 8
"""Number of compared re-saves for a pair of places. A comparison blocks the host and reads the tensor over the link."""


class Rewrites:
    """Remembers which pairs of places write in between.

    Args:
        device: Where the copies were queued.
        transfers: Has what was reloaded.
    """

    def __init__(self, device: Device, transfers: Transfers) -> None:
        self._device = device
        self._transfers = transfers
        self._counts: dict[tuple[Site | None, Site | None], int] = {}
        self._rewriting: set[tuple[Site | None, Site | None]] = set()

    def follow(self, saved: SavedStorage, tensor: torch.Tensor, place: Place) -> None:
        """Take the bytes of `saved` from its storage again where they may have been written over since they were copied.

        Args:
            saved: Offloaded, or in flight.
            tensor: On its storage, saved at `place`.
            place: Where it is saved again.

        Streams:
            The first times for a pair of places the host blocks until the copy to the host, and what the current stream has
            queued, is done.
        """
        pair = (saved.place.site, place.site)
        if pair not in self._rewriting:
            count = self._counts.get(pair, 0)
            if count < COMPARISONS and not self._device.is_capturing():  # steps before the capture have compared
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
            # Padding between the views is whatever lay there: it is taken from the copy.
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
