"""Predicts step times and memory peaks of settings. Loads torch."""

import dataclasses
import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.measurement import Measurement
from fgoffload.benchmark.rank_models import build_profile_ranks, build_table_ranks, load_profile
from fgoffload.benchmark.settings import BASELINE, FULL, OWN_HOOKS, Setting, System
from fgoffload.errors import OffloadError, PlanError
from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.output_copies import copy_outputs
from fgoffload.planner.ranks.rank_model import RankModel, Turn
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import FullMethod, FullRecompute, MegatronFlags, SelectiveRecompute
from fgoffload.planner.timing.hardware import Hardware, find_hardware
from fgoffload.planner.timing.profile import Profile
from fgoffload.tags import find_recompute_unit

logger = logging.getLogger(__name__)


class Source(enum.Enum):
    """Data on which the predictions are based."""

    TABLE = "table"  # formulas and the hardware table
    PROFILE = "profile"  # one measured baseline step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Simulated step time and memory of one setting."""

    step_s: float
    ratio: float
    """Step time relative to the simulated step of `baseline`."""
    peak_bytes: int
    """Peak device bytes, the maximum over ranks."""
    static_bytes: int
    """Part of `peak_bytes` that stays allocated throughout the step."""

    def find_peak(self, measurement: Measurement) -> int:
        """Return the bytes to compare with the peak of `measurement`. On a CPU, that peak counts only activations."""
        return self.peak_bytes - (self.static_bytes if measurement.peak_allocated_bytes is None else 0)


Predictions = Mapping[Setting, Mapping[Source, Prediction]]
"""Predictions keyed by setting, then by source. A source that cannot simulate a setting is missing."""


class Forecaster:
    """Predicts step time and peak memory of settings from each available source.

    The profile of `job` must already exist. `device` is torch's name for the benchmark's device.
    """

    def __init__(self, job: Job, device: str) -> None:
        self._job = job
        self._ranks: dict[Source, Sequence[RankModel]] = {}
        sources: dict[Source, tuple[Callable[[Job, Any], Sequence[RankModel]], Hardware | Profile | None]] = {
            Source.TABLE: (build_table_ranks, find_hardware(device)),
            Source.PROFILE: (build_profile_ranks, load_profile(job, device)),
        }
        for source, (build_ranks, times) in sources.items():
            try:
                if times is not None:
                    self._ranks[source] = build_ranks(job, times)
            except OffloadError as error:
                logger.warning("cannot predict from the %s: %s", source.value, error)

    def predict(self, setting: Setting) -> dict[Source, Prediction]:
        """Return the predictions for a setting. A source that fails is omitted with a warning."""
        found: dict[Source, Prediction] = {}
        planned = setting.with_plan(self._job.find_plan_path(setting)) if setting.system is System.BUDGET else setting
        for source, ranks in self._ranks.items() if setting.system not in OWN_HOOKS else ():
            try:
                found[source] = predict(ranks, planned)
            except Exception as error:
                logger.warning("cannot predict %s from the %s: %s", setting.name, source.value, error, exc_info=True)
        return found


def predict(ranks: Sequence[RankModel], setting: Setting) -> Prediction:
    """Simulate a setting whose system is not in `OWN_HOOKS`. A setting with a budget must already have a plan.

    Raises:
        ConfigError: The planner does not support a module of the setting.
        PlanError: The plan file cannot be read, or `ranks` cannot execute the setting.
    """
    plan = _make_plan(ranks, setting)
    # Megatron's own recompute does not use our engine.
    has_engine = setting.system is not System.RECOMPUTE
    ranks = [dataclasses.replace(rank, has_engine=has_engine, turn=Turn.CANCEL) for rank in ranks]
    if setting.plan is None:
        ranks = [copy_outputs(rank) for rank in ranks]
    result, baseline = simulate(ranks, plan), simulate(ranks, _make_plan(ranks, BASELINE))
    return Prediction(
        step_s=result.step_s,
        ratio=result.step_s / baseline.step_s,
        peak_bytes=result.peak_bytes,
        static_bytes=result.worst_rank.static_bytes,
    )


def _make_plan(ranks: Sequence[RankModel], setting: Setting) -> OffloadPlan:
    if setting.plan is not None:
        return OffloadPlan.load(setting.plan)
    recompute: FullRecompute | SelectiveRecompute | None = None
    if setting.recompute == (FULL,):
        recompute = FullRecompute(method=FullMethod.UNIFORM)
    elif setting.recompute:
        recompute = SelectiveRecompute(modules=setting.recompute)
    flags = MegatronFlags(offload_modules=setting.modules, activation_offload_fraction=setting.fraction, recompute=recompute)
    plan = flags.make_plan(ranks)
    # A profile omits modules whose recompute may not be bitwise identical. The simulator would silently keep their tensors.
    units = (find_recompute_unit(site.tag) for site, action in plan.actions.items() if action.recomputes)
    recomputed = {unit.recompute_module or FULL for unit in units if unit is not None}
    if missing := [module for module in setting.recompute if module not in recomputed]:
        raise PlanError(f"the profile has no recompute time for {missing[0]}.")
    return plan
