"""Base class of handles and blocks, which owns an engine and reads its statistics."""

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fgoffload.engine import Lane, OffloadEngine, StepStats, TagStats
from fgoffload.integrations.pytorch.devices import DeviceChoice, check_device
from fgoffload.integrations.pytorch.report import RunTotals, TagUse, explain_idle, say_where
from fgoffload.integrations.pytorch.tensors import OffloadedTensor, check_config, check_tensor, make_engine, offload_with
from fgoffload.transfer_config import TransferConfig
from fgoffload.units import MIB, format_bytes

logger = logging.getLogger(__name__)


DEFAULT_GROUP_BYTES = 64 * MIB
"""Bytes. At 50 GB/s this is 1.3 ms of copies, much more than the tens of microseconds of CPU time that a group costs. It is an
eighth of the default prefetch size, so that prefetch proceeds evenly."""

WATCHED_FORWARDS = 3
"""Number of forwards without `stats` after which idle tags are reported anyway. The first forwards may be warm-up."""


class EngineOwner:
    """Owns one engine, created on first use, and reads its statistics. Copies share the owner.

    A `device` of None takes the device of the tensors when the engine is created. All `tags` should offload something.
    """

    engine_type: type[OffloadEngine] = OffloadEngine
    """The engine's class, which `estimate_savings` replaces."""

    def __init__(
        self,
        config: TransferConfig | None,
        *,
        device: DeviceChoice,
        name: str,
        tags: Iterable[str],
        group_bytes: int | None = None,
    ) -> None:
        check_device(device)
        self.config = check_config(config) or TransferConfig()
        self._policy = self.config.derive_policy()
        self._given_group_bytes = group_bytes
        self.last_stats: StepStats | None = None
        """Last result of `stats`. None before the first call."""
        self.last_totals = RunTotals()
        """Totals of `last_stats` over all tags."""
        self._device = device
        self.name = name
        """Name of the offloaded model or block, for logs."""
        self._engine: OffloadEngine | None = None
        # Two threads may share one owner.
        self._lock = threading.Lock()
        self._forwards = 0
        self._finished_forwards = 0
        self._watched_forwards = 0
        """Number of forwards with gradients, even if offload could do nothing there. Counted up to `WATCHED_FORWARDS`."""
        self._uses = {tag: TagUse() for tag in tags}
        self._totals = RunTotals()
        self.is_watching = True
        """Whether idle tags have not been reported yet."""
        self._is_reported = False

    def __repr__(self) -> str:
        """Return name, tags, and the bytes offloaded in the last step."""
        if not self.config.enabled:
            state = "disabled"
        elif self._engine is None:
            state = "no forward yet"
        elif self.last_stats is None:
            state = "no stats read yet"
        else:
            state = f"{format_bytes(self.last_stats.d2h_bytes)} offloaded in the last step"
        return f"<{type(self).__name__} of {self.name} (tags: {' '.join(self._uses) or 'none'}), {state}>"

    @property
    def engine(self) -> OffloadEngine | None:
        """Engine. None before the first forward with gradients."""
        return self._engine

    @property
    def group_bytes(self) -> int:
        """Saved bytes at which a group ends and the next one begins."""
        return self._given_group_bytes or min(DEFAULT_GROUP_BYTES, self._policy.prefetch_bytes // 4 or DEFAULT_GROUP_BYTES)

    def get_engine(self, given: Any = ()) -> OffloadEngine:
        """Return the engine, and create it if needed. `given`, the input of the forward, may show the device."""
        with self._lock:
            if self._engine is None:
                self._engine = make_engine(
                    self.config, self._device, self._find_tensors(given), policy=self._policy, engine_type=self.engine_type
                )
            return self._engine

    def count_forward(self) -> int:
        """Count a forward with gradients, and return the number of earlier ones since the last `stats`."""
        with self._lock:
            self._forwards += 1
            self._is_reported = False
            return self._forwards - 1

    def count_finished(self, lane: Lane) -> None:
        """Count a forward with gradients that ended without an exception, with its groups in `lane`."""
        with self._lock:
            self._finished_forwards += 1
        self._derive_policy(lane)
        self._watch_forward()

    def _derive_policy(self, lane: Lane) -> None:
        """Derive window and prefetch sizes from the offloaded bytes, unless the user gave them."""
        largest_bytes = max((group.moved_bytes for group in lane.groups), default=0)
        if self._engine is None or largest_bytes == 0:
            return
        self._policy = self.config.derive_policy(
            offloaded_bytes=self._engine.arena.peak_bytes, largest_group_bytes=largest_bytes
        )
        self._engine.set_policy(self._policy)

    def count_inert(self, tag: str | None, *, hook: Any, is_in_backward: bool) -> None:
        """Count a region of `tag`, or a forward if None, that did nothing.

        It ran in a backward, or below the foreign pack `hook` or, without one, where hooks are not allowed.
        """
        if tag is None:
            self._watch_forward()
            return
        with self._lock:
            use = self._uses.setdefault(tag, TagUse())
            if is_in_backward:
                use.recomputed += 1
            else:
                use.shadowed += 1
                use.shadow = use.shadow or say_where(hook)

    def count_hidden(self, tag: str) -> None:
        """Count a region of `tag` inside which foreign hooks took all saved tensors."""
        with self._lock:
            self._uses.setdefault(tag, TagUse()).hidden += 1

    def expect_tag(self, tag: str) -> None:
        """Add a manual region's tag to the tags that should offload something."""
        with self._lock:
            self._uses.setdefault(tag, TagUse())

    def stats(self) -> StepStats:
        """Return the statistics since the last call. Call it once per step.

        After the first step, one warning names each tag that offloaded nothing, with the reason. Without calls of `stats`, the
        warning comes after the third forward.
        """
        stats = StepStats() if self._engine is None else self._engine.finish_step()
        with self._lock:
            forwards, self._forwards = self._forwards, 0
            finished, self._finished_forwards = self._finished_forwards, 0
            self.last_totals = RunTotals()
            self.last_totals.add(stats, forwards=forwards)
            self._totals.add(stats, forwards=forwards)
            is_first = self.is_watching and (finished > 0 or any(use.shadowed or use.recomputed for use in self._uses.values()))
            self.is_watching = self.is_watching and not is_first
        if is_first:
            self._warn_of_idle(stats.tags)
        self.last_stats = stats
        return stats

    def offload_tensor(self, tensor: torch.Tensor) -> OffloadedTensor:
        """Offload one tensor now, by the same rules as for saved tensors.

        Lifetime:
            See `OffloadedTensor`. Your own references to `tensor` keep its device memory alive.

        Raises:
            ConfigError: `tensor` is not a strided tensor.
        """
        check_tensor(tensor)
        return offload_with(self.get_engine(tensor) if self.config.enabled else None, tensor)

    def close(self) -> None:
        """Release all memory that no graph still needs, and log the totals. A second call does nothing."""
        self.report()
        if self._engine is not None:
            self._engine.close()

    def report(self) -> None:
        """Read the last statistics, and log the totals once."""
        if self._is_reported or (self._engine is None and not self._uses):
            return
        self.stats()
        self._is_reported = True
        if self._engine is None and self.config.enabled and self.is_watching:
            logger.warning(
                "offload of %s had no effect: no forward with gradients went through it. Call the offloaded model, and "
                "compile it after `offload`.",
                self.name,
            )
        if self._totals.forwards:
            logger.info("offload of %s ends after %s", self.name, self._totals)

    def _find_tensors(self, given: Any) -> Iterable[torch.Tensor] | None:
        """Return tensors that show the device of the forward, or None. See `make_device`."""
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineOwner":
        """Return itself, since copies share memory and statistics."""
        return self

    def _watch_forward(self) -> None:
        if not self.is_watching:
            return
        with self._lock:
            self._watched_forwards += 1
            is_due = self.is_watching and self._watched_forwards >= WATCHED_FORWARDS
            self.is_watching = self.is_watching and not is_due
        if is_due:
            self._warn_of_idle({} if self._engine is None else self._engine.read_tags())

    def _warn_of_idle(self, tags: Mapping[str, TagStats]) -> None:
        with self._lock:
            uses = dict(self._uses)
        for tag, use in uses.items():
            explanation = explain_idle(tag, tags.get(tag), use)
            if explanation is not None:
                logger.warning("offload of %s: %s", self.name, explanation)
        if not uses:
            logger.warning(
                "offload of %s: no module is selected and no `fgoffload.region` ran in its forward, so nothing is offloaded. "
                "Select modules, or place regions.",
                self.name,
            )
