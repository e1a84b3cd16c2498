"""Counts the device bytes that autograd keeps alive, independently of the engine.

A ledger checks at each saved tensor which storages are alive, so it slows down the step.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from fgoffload.engine.identity import StorageRef, get_key


class LedgerSample(NamedTuple):
    """Bytes of live storages at one moment."""

    position: int
    """Number of tensors that autograd has saved or unpacked so far. Unlike a time, it is the same in every run."""
    resident_bytes: int
    place: str
    """Place of the last save or unpack, such as `layers.3.core_attn mb=2` or `backward of layers.3.core_attn mb=2`.
    Empty outside the engine's regions."""


class ActivationLedger:
    """Counts the bytes of live storages that autograd saved or the engine reloaded.

    The storages of the model's `parameters` are not counted, because they are not activations.
    """

    def __init__(self, *, parameters: Iterable[torch.Tensor]) -> None:
        self._ignored = {get_key(parameter) for parameter in parameters}
        self._alive: dict[int, StorageRef] = {}
        self._position = 0
        self._place: object = ""
        self.samples: list[LedgerSample] = []
        """Samples in order, one for each saved tensor, unpacked tensor and device buffer of the engine."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes over all samples, or 0 before the first sample."""
        return max((sample.resident_bytes for sample in self.samples), default=0)

    def find_peak(self) -> LedgerSample | None:
        """Return the first sample with the peak bytes, or None before the first sample."""
        return max(self.samples, key=lambda sample: sample.resident_bytes, default=None)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count the tensors that autograd saves in the body. Regions report to the `observers` of their engine instead."""
        with torch.autograd.graph.saved_tensors_hooks(LedgerHook(self), self._unpack):
            yield
        self.sample()

    def count_save(self, tensor: torch.Tensor, *, place: object = "") -> None:
        """Count `tensor`, which autograd has saved at `place`."""
        self._position += 1
        self._place = place
        self.observe(tensor)

    def count_take(self, *, place: object = "") -> None:
        """Record a sample after autograd has unpacked a tensor that was saved at `place`."""
        self._position += 1
        self.reach_backward(place=place)
        self.sample()

    def reach_backward(self, *, place: object) -> None:
        """Label the next samples as the backward of `place`."""
        self._place = f"backward of {place}" if str(place) else ""

    def observe(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` until it is freed, and record a sample."""
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            key = get_key(tensor)
            if key not in self._ignored and key not in self._alive:
                self._alive[key] = StorageRef(tensor)
        self.sample()

    def sample(self) -> None:
        """Record the bytes that are alive now."""
        resident_bytes = 0
        for key, reference in tuple(self._alive.items()):
            # The size may change, because a recompute empties storages without freeing them.
            storage = reference.find_storage()
            if storage is None:
                del self._alive[key]
            else:
                resident_bytes += storage.nbytes()
        self.samples.append(LedgerSample(self._position, resident_bytes, str(self._place)))

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count_take()
        return tensor


@dataclasses.dataclass(slots=True, eq=False)
class LedgerHook:
    """Pack hook of a ledger. The engine recognizes the hook by its type."""

    ledger: ActivationLedger

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count `tensor` and return it detached from its graph. See [Note: Ownership]."""
        detached = tensor.detach()
        self.ledger.count_save(detached)
        return detached
