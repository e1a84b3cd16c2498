"""What is predicted of the settings of one benchmark, from the hardware table and from a profile. Loads torch.

It works in the process that shows results, beside the ones that measure: a simulation takes a core for milliseconds.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.planning import build_job_ranks, build_profile_ranks
from fgoffload.benchmark.prediction import Forecast, Prediction, Source
from fgoffload.benchmark.settings import Setting, System
from fgoffload.benchmark.simulation import SIMULATED, predict
from fgoffload.benchmark.surroundings import find_hardware
from fgoffload.errors import ConfigError, OffloadError
from fgoffload.integrations.megatron.training_arguments import TrainingArguments
from fgoffload.integrations.megatron.training_policy import Update
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.planner.timing.profile import Profile

logger = logging.getLogger(__name__)

_ANY_DEVICE = "h100"
"""Says what a layer can run again, which is the same on all devices."""


def check_profile(profile: Profile, arguments: TrainingArguments, *, update: Update, source: str) -> None:
    """Check that a profile is one of a training, measured as the benchmark measures.

    Args:
        profile: What was read.
        arguments: The training.
        update: What its steps do with their gradients.
        source: Where the profile came from, for errors.

    Raises:
        ConfigError: It is not: with what differs, and what to give instead.
    """
    here = "Give --profile without a file, and it is measured here."
    layers, wanted = sum(len(rank.layers) for rank in profile.ranks), arguments.transformer["num_layers"]
    if layers not in (wanted, wanted + (arguments.transformer.get("mtp_num_layers") or 0)):
        raise ConfigError(f"{source} is of {layers} layers, and the model has {wanted}. {here}")
    if profile.has_optimizer != (update is not Update.NONE):
        words = ("without an optimizer", "with an optimizer")
        raise ConfigError(
            f"{source} was measured {words[profile.has_optimizer]}, and this benchmark runs {words[not profile.has_optimizer]} "
            f"(--with-optimizer). {here}"
        )


class Forecaster:
    """Predicts settings.

    Args:
        job: What is measured.
        profile: A profile that was measured before, checked; None where there is none, or where the benchmark measures one.
    """

    def __init__(self, job: Job, *, profile: Profile | None = None) -> None:
        self._job = job
        self._profile = profile
        self._profile_ranks: Sequence[RankModel] | None = None
        """What that makes of the ranks; None until somebody asks."""
        self._device: str | None = None

    def meet(self, device: str) -> None:
        """Take note of the device that the benchmark runs on."""
        self._device = device

    def read_profile(self) -> None:
        """Take the profile that the benchmark has measured. One that cannot be read costs its predictions alone."""
        try:
            self._profile, self._profile_ranks = Profile.load(self._job.profile_path), None
        except ConfigError as error:
            logger.warning("Nothing is predicted from the profile: %s", error)

    def renew_plain_step(self, seconds: float) -> None:
        """Let the profile that the benchmark has measured have a plain step that is known better, in its file too.

        Args:
            seconds: What that takes.
        """
        if self._profile is None:
            return  # it could not be read, which was said then
        self._profile, self._profile_ranks = dataclasses.replace(self._profile, plain_step_s=seconds), None
        try:
            self._profile.save(self._job.profile_path)
        except ConfigError as error:
            logger.warning("The profile keeps the plain step of its minute: %s", error)

    def predict(self, setting: Setting) -> Forecast:
        """Return what is predicted of a setting, and why a source has nothing to say of it."""
        predictions: dict[Source, Prediction] = {}
        reasons: dict[Source, str] = {}
        if setting.system not in SIMULATED:
            return Forecast()
        for source in self._list_sources():
            try:
                predictions[source] = self._predict(source, self._find_plan(setting))
            except OffloadError as error:
                reasons[source] = " ".join(str(error).split())
            except Exception as error:
                # A fault of the planner's must not cost what is measured.
                logger.warning("%s is not predicted %s", setting.name, source.title, exc_info=True)
                reasons[source] = f"{type(error).__name__}: {error}"
        return Forecast(predictions=predictions, reasons=reasons)

    def _list_sources(self) -> list[Source]:
        """Return the sources that are there: a device that the table does not have is no fault."""
        is_in_table = self._device is not None and find_hardware(self._device) is not None
        return [*([Source.TABLE] if is_in_table else []), *([Source.PROFILE] if self._profile is not None else [])]

    def _predict(self, source: Source, setting: Setting) -> Prediction:
        if source is Source.TABLE:
            return predict(self._table_ranks, setting)
        return predict(self._make_profile_ranks(), setting, like=self._like)

    def _find_plan(self, setting: Setting) -> Setting:
        return setting.with_plan(self._job.find_plan_path(setting)) if setting.system is System.BUDGET else setting

    @functools.cached_property
    def _table_ranks(self) -> tuple[RankModel, ...]:
        found = None if self._device is None else find_hardware(self._device)
        return build_job_ranks(self._job, found or get_hardware(_ANY_DEVICE))

    @functools.cached_property
    def _like(self) -> tuple[RankModel, ...] | None:
        """The ranks as the model's shape says, or None where the planner knows no such shape: a model in fp32, for one."""
        try:
            return self._table_ranks
        except ConfigError:
            return None

    def _make_profile_ranks(self) -> Sequence[RankModel]:
        profile = self._profile
        if profile is None:
            return ()
        if profile.device != self._device:
            raise ConfigError(f"the profile is of {profile.device}, and this is {self._device}. Measure one here.")
        if self._profile_ranks is None:
            self._profile_ranks = build_profile_ranks(self._job, profile)  # which simulates its compared steps
        return self._profile_ranks
