"""An independent count of the device bytes that autograd keeps alive.

The ledger counts each storage once and checks in torch whether it is alive, independently of the engine. It costs about a
microsecond for each living storage and saved tensor, so a measured step cannot be timed.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from fgoffload.engine.identity import StorageRef, get_key


class LedgerSample(NamedTuple):
    """The bytes alive at one moment."""

    position: int
    """Tensors that autograd has saved and taken back so far: the same moment of the same step in every run, and no time."""
    resident_bytes: int
    place: str
    """Where the step was: what was saved last, as in `layers.3.core_attn mb=2`, or taken, as in `backward of layers.3.core_attn
    mb=2`. Empty outside of the engine's watch."""


class ActivationLedger:
    """Bytes of every live storage that autograd saved or the engine reloaded.

    Args:
        parameters: Their storages are not activations and are not counted.
    """

    def __init__(self, *, parameters: Iterable[torch.Tensor]) -> None:
        self._ignored = {get_key(parameter) for parameter in parameters}
        self._alive: dict[int, StorageRef] = {}
        self._position = 0
        self._place: object = ""
        self.samples: list[LedgerSample] = []
        """One for each tensor saved or taken back and each buffer of the engine, in order."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes alive over all samples; 0 before the first."""
        peak = self.find_peak()
        return 0 if peak is None else peak.resident_bytes

    def find_peak(self) -> LedgerSample | None:
        """Return the first sample with the most bytes alive, which says where in the step that is; None before the first."""
        return max(self.samples, key=lambda sample: sample.resident_bytes, default=None)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count what autograd saves inside. Engine regions inside work as without it, and report to the engine's observers."""
        with torch.autograd.graph.saved_tensors_hooks(LedgerHook(self), self._unpack):
            yield
        self.sample()

    def count_save(self, tensor: torch.Tensor, *, place: object = "") -> None:
        """Autograd has saved `tensor` at `place`, whose text is for people."""
        self._position += 1
        self._place = place
        self.observe(tensor)

    def count_take(self, *, place: object = "") -> None:
        """Autograd has taken a tensor back that was saved at `place`."""
        self._position += 1
        self.reach_backward(place=place)
        self.sample()

    def reach_backward(self, *, place: object) -> None:
        """Backward has come to `place`."""
        self._place = f"backward of {place}" if str(place) else ""

    def observe(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` from now until it is freed, and take a sample."""
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            key = get_key(tensor)
            if key not in self._ignored and key not in self._alive:
                self._alive[key] = StorageRef(tensor)
        self.sample()

    def sample(self) -> None:
        """Note how many bytes are alive now."""
        resident_bytes = 0
        for key, reference in tuple(self._alive.items()):
            # The bytes are asked for each time: a recompute empties a storage that lives on.
            size_bytes = reference.find_nbytes()
            if size_bytes is None:
                del self._alive[key]
            else:
                resident_bytes += size_bytes
        self.samples.append(LedgerSample(self._position, resident_bytes, str(self._place)))

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count_take()
        return tensor


class LedgerHook:
    """The pack hook of a ledger, known to the engine by its type."""

    def __init__(self, ledger: ActivationLedger) -> None:
        self.ledger = ledger

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count `tensor` and leave it as it is, but for its graph: see [Note: What owns what]."""
        detached = tensor.detach()
        self.ledger.count_save(detached)
        return detached
