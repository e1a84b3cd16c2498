"""Simulates the settings of a benchmark, in the process that shows results. Loads torch."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.prediction import Prediction, Source
from fgoffload.benchmark.rank_models import build_job_ranks, build_profile_ranks
from fgoffload.benchmark.settings import BASELINE, FULL, Setting, System
from fgoffload.benchmark.surroundings import find_hardware
from fgoffload.errors import OffloadError, PlanError
from fgoffload.plan import OffloadPlan
from fgoffload.planner.ranks.output_copies import copy_outputs
from fgoffload.planner.ranks.rank_model import RankModel, Turn
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import FullMethod, FullRecompute, MegatronFlags, SelectiveRecompute
from fgoffload.planner.timing.profile import Profile
from fgoffload.tags import find_recompute_unit

logger = logging.getLogger(__name__)

SIMULATED = (System.BASELINE, System.RECOMPUTE, System.OURS, System.PLAN, System.BUDGET)
"""Systems whose copies the simulator can schedule."""


class Forecaster:
    """Predicts step time and peak memory of settings.

    Args:
        job: The benchmark's options.
        profile: An existing profile; None if there is none, or if the benchmark measures one.
    """

    def __init__(self, job: Job, *, profile: Profile | None = None) -> None:
        self._job = job
        self._profile = profile
        self._ranks: dict[Source, Sequence[RankModel]] = {}

    def meet(self, device: str) -> None:
        """Prepare predictions for the benchmark's device. It is no error if the hardware table lacks the device."""
        hardware, profile = find_hardware(device), self._profile
        if hardware is not None:
            self._learn(Source.TABLE, lambda: build_job_ranks(self._job, hardware))
        if profile is not None and profile.device != device:
            logger.warning("The profile gives no predictions: it is of %s, and this is %s", profile.device, device)
        elif profile is not None:
            self._learn(Source.PROFILE, lambda: build_profile_ranks(self._job, profile))

    def read_profile(self) -> None:
        """Also predict from the profile that the benchmark measured."""
        self._learn(Source.PROFILE, lambda: build_profile_ranks(self._job, Profile.load(self._job.profile_path)))

    def predict(self, setting: Setting) -> dict[Source, Prediction]:
        """Return each source's prediction for a setting. An error costs the prediction, never the measurement."""
        found: dict[Source, Prediction] = {}
        planned = setting.with_plan(self._job.find_plan_path(setting)) if setting.system is System.BUDGET else setting
        for source, ranks in self._ranks.items() if setting.system in SIMULATED else ():
            try:
                found[source] = predict(ranks, planned)
            except Exception as error:
                logger.warning("%s is not predicted from the %s: %s", setting.name, source.value, error, exc_info=True)
        return found

    def _learn(self, source: Source, build_ranks: Callable[[], Sequence[RankModel]]) -> None:
        try:
            self._ranks[source] = build_ranks()
        except OffloadError as error:
            logger.warning("Nothing is predicted from the %s: %s", source.value, error)


def predict(ranks: Sequence[RankModel], setting: Setting) -> Prediction:
    """Simulate a setting whose system is in `SIMULATED`. A setting with a budget needs its plan.

    Raises:
        ConfigError: The planner does not know a module of the setting.
        PlanError: The plan file cannot be read, or `ranks` cannot execute the setting.
    """
    plan = _make_plan(ranks, setting)
    # Megatron's own recompute runs without this package.
    has_engine = setting.system is not System.RECOMPUTE
    ranks = [dataclasses.replace(rank, has_engine=has_engine, turn=Turn.CALL_BACK) for rank in ranks]
    if setting.plan is None:
        ranks = [copy_outputs(rank) for rank in ranks]
    result, nothing = simulate(ranks, plan), simulate(ranks, _make_plan(ranks, BASELINE))
    return Prediction(
        step_s=result.step_s,
        ratio=result.step_s / nothing.step_s,
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
    # A profile lacks modules whose recompute may change bits. Do not predict them as if nothing were recomputed.
    units = (find_recompute_unit(site.tag) for site, action in plan.actions.items() if action.recomputes)
    recomputed = {unit.recompute_module or FULL for unit in units if unit is not None}
    if missing := [module for module in setting.recompute if module not in recomputed]:
        raise PlanError(f"the recompute of {missing[0]} by itself was not measured.")
    return plan
