"""Base class of handles and blocks, which owns an engine and reads its statistics."""

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fgoffload.engine import Lane, OffloadEngine, StepStats, TagStats
from fgoffload.integrations.pytorch.devices import DeviceChoice, check_device
from fgoffload.integrations.pytorch.report import RunTotals, explain_idle, explain_inert
from fgoffload.integrations.pytorch.tensors import OffloadedTensor, check_config, check_tensor, make_engine, offload_with
from fgoffload.transfer_config import TransferConfig
from fgoffload.units import MIB, format_bytes

logger = logging.getLogger(__name__)

DEFAULT_GROUP_BYTES = 64 * MIB
"""At 50 GB/s, copying a group of this size takes 1.3 ms, much longer than the tens of microseconds of CPU time per group.
Eight groups fit into the default prefetch size, so prefetching proceeds in small, even steps."""

WATCHED_FORWARDS = 3
"""Number of forwards after which tags that offload nothing are reported even if `stats` is not called."""


class EngineOwner:
    """Owns one engine, created on first use, and reads its statistics. `copy.deepcopy` returns the object itself.

    If `device` is None, the engine uses the device of the tensors. A warning reports each of `tags` that offloads nothing.
    """

    engine_type: type[OffloadEngine] = OffloadEngine
    """Class of the engine. `estimate_savings` replaces it."""

    def __init__(self, config: TransferConfig | None, *, device: DeviceChoice, name: str, tags: Iterable[str]) -> None:
        check_device(device)
        self.config = check_config(config) or TransferConfig()
        self._policy = self.config.derive_policy()
        self._given_group_bytes: int | None = None
        self.last_stats: StepStats | None = None
        """Last result of `stats`. None before the first call."""
        self.last_totals = RunTotals()
        """Totals of `last_stats` over all tags."""
        self._device = device
        self.name = name
        """Name of the offloaded model or block, for logs."""
        self.engine: OffloadEngine | None = None
        """None until the first forward with gradients or the first `offload_tensor`."""
        # Two threads may share one owner.
        self._lock = threading.Lock()
        self._forwards = 0
        self._watched_forwards = 0
        """Number of forwards with gradients, including those in which offload did nothing."""
        self._inert = dict.fromkeys(tags, "")
        """Reason why a tag's regions did nothing, keyed by tag. Empty if no reason was recorded."""
        self._totals = RunTotals()
        self._is_watching = True
        """Whether tags that offload nothing have yet to be reported."""
        self._is_reported = False

    def __repr__(self) -> str:
        """Return the name, the tags, and the bytes offloaded in the last step."""
        state = f"{format_bytes(self.last_totals.d2h_bytes)} offloaded in the last step"
        return f"<{type(self).__name__} of {self.name} (tags: {' '.join(self._inert) or 'none'}), {state}>"

    @property
    def group_bytes(self) -> int:
        """Size in bytes at which a group ends and the next one begins."""
        return self._given_group_bytes or min(DEFAULT_GROUP_BYTES, self._policy.prefetch_bytes // 4 or DEFAULT_GROUP_BYTES)

    def get_engine(self, inputs: Any = ()) -> OffloadEngine:
        """Return the engine, and create it on first use. The tensors in the forward's `inputs` may determine the device."""
        with self._lock:
            if self.engine is None:
                self.engine = make_engine(
                    self.config, self._device, self._find_tensors(inputs), policy=self._policy, engine_type=self.engine_type
                )
            return self.engine

    def count_forward(self) -> int:
        """Count a forward with gradients, and return the number of earlier forwards since the last `stats`."""
        with self._lock:
            self._forwards += 1
            self._is_reported = False
            return self._forwards - 1

    def count_finished(self, lane: Lane) -> None:
        """Count a forward with gradients that ended without an exception. `lane` contains its groups."""
        self._derive_policy(lane)
        self._watch_forward()

    def _derive_policy(self, lane: Lane) -> None:
        """Derive the window and prefetch sizes from the offloaded bytes, unless the user set them."""
        largest_bytes = max((group.moved_bytes for group in lane.groups), default=0)
        if self.engine is None or largest_bytes == 0:
            return
        self._policy = self.config.derive_policy(
            offloaded_bytes=self.engine.arena.peak_bytes, largest_group_bytes=largest_bytes
        )
        self.engine.set_policy(self._policy)

    def count_inert(self, tag: str | None, *, hook: Any, is_in_backward: bool) -> None:
        """Record why the regions of `tag` do nothing. If `tag` is None, count a forward in which offload does nothing."""
        if tag is None:
            self._watch_forward()
            return
        with self._lock:
            self._inert[tag] = self._inert.get(tag) or explain_inert(hook, is_in_backward=is_in_backward)

    def expect_tag(self, tag: str) -> None:
        """Register the tag of a manual region, so that a warning appears if no region with this tag offloads anything."""
        with self._lock:
            self._inert.setdefault(tag, "")

    def stats(self) -> StepStats:
        """Return the statistics since the last call. Call this once per step.

        After the first step, a warning reports each tag that offloaded nothing, with the reason. If `stats` is never called,
        this warning follows the third forward.
        """
        stats = StepStats() if self.engine is None else self.engine.finish_step()
        with self._lock:
            forwards, self._forwards = self._forwards, 0
            self.last_totals = RunTotals()
            self.last_totals.add(stats, forwards=forwards)
            self._totals.add(stats, forwards=forwards)
            is_first = self._is_watching and self._watched_forwards > 0
            self._is_watching = self._is_watching and not is_first
        if is_first:
            self._warn_of_idle(stats.tags)
        self.last_stats = stats
        return stats

    def offload_tensor(self, tensor: torch.Tensor) -> OffloadedTensor:
        """Offload one tensor immediately, by the same rules as saved tensors.

        Lifetime:
            See `OffloadedTensor`. Your references to `tensor` keep its device memory alive.

        Raises:
            ConfigError: `tensor` is not a strided tensor.
        """
        check_tensor(tensor)
        return offload_with(self.get_engine(tensor) if self.config.enabled else None, tensor)

    def close(self) -> None:
        """Release all memory that no graph needs, and log the totals. A second call does nothing."""
        self.report()
        if self.engine is not None:
            self.engine.close()

    def report(self) -> None:
        """Read the last statistics, and log the totals once."""
        if self._is_reported or (self.engine is None and not self._inert):
            return
        self.stats()
        self._is_reported = True
        if self.engine is None and self.config.enabled and self._is_watching:
            logger.warning(
                "offload of %s had no effect: no forward with gradients used it. Call the model that you passed to `offload`, "
                "and compile it only after `offload`.",
                self.name,
            )
        if self._totals.forwards:
            logger.info("offload of %s ended after %s", self.name, self._totals)

    def _find_tensors(self, inputs: Any) -> Iterable[torch.Tensor] | None:
        """Return tensors that determine the engine's device, or None. See `make_device`."""
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineOwner":
        """Return this object itself, so that copies share its memory and statistics."""
        return self

    def _watch_forward(self) -> None:
        with self._lock:
            self._watched_forwards += 1
            is_due = self._is_watching and self._watched_forwards >= WATCHED_FORWARDS
            self._is_watching = self._is_watching and not is_due
        if is_due:
            self._warn_of_idle({} if self.engine is None else self.engine.read_tags())

    def _warn_of_idle(self, tags: Mapping[str, TagStats]) -> None:
        with self._lock:
            inert = dict(self._inert)
        for tag, reason in inert.items():
            explanation = explain_idle(tag, tags.get(tag), reason)
            if explanation is not None:
                logger.warning("offload of %s: %s", self.name, explanation)
        if not inert:
            logger.warning(
                "offload of %s: nothing is offloaded, since no module is selected and its forward ran no `fgoffload.region`. "
                "Pass `modules` or `memory` to `fgoffload.offload`, or add regions.",
                self.name,
            )
