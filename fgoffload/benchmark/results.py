"""Runs a whole benchmark: settings in order for each kind of process. Result files are updated after each setting."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fgoffload.benchmark.job import Job, Message, Workload
from fgoffload.benchmark.measurement import Outcome, Run
from fgoffload.benchmark.prediction import Forecaster, Prediction, Source
from fgoffload.benchmark.processes import run_sessions
from fgoffload.benchmark.report import format_csv, format_json
from fgoffload.benchmark.settings import BASELINE, ProcessKind, Setting
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.output_files import write_file

CSV_NAME, JSON_NAME, PICTURE_NAME = "results.csv", "run.json", "frontier.png"
"""Names of the files in a benchmark's folder."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Results:
    """The results of a benchmark so far."""

    job: Job
    """The benchmark's options."""
    workload: Workload
    """Description of the training."""
    about: Mapping[str, Any]
    """Date and command for the JSON file."""
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    """Outcomes in the order of their runs."""
    surroundings: Surroundings | None = None
    """Versions and device; None until a process reports them."""
    forecaster: Forecaster | None = None
    """Forecaster of the settings; None if bits are compared, and until a process reports its device."""
    predictions: dict[Setting, Mapping[Source, Prediction]] = dataclasses.field(default_factory=dict)
    """Predictions of the measured settings."""

    def add(self, outcome: Outcome) -> None:
        """Record the outcome of a run, and write the result files."""
        self.outcomes.append(outcome)
        if self.forecaster is not None and outcome.measurement is not None and outcome.setting not in self.predictions:
            self.predictions[outcome.setting] = self.forecaster.predict(outcome.setting)
        rows = format_csv(self.outcomes, self.workload, self.predictions)
        document = format_json(self.outcomes, self.workload, self.surroundings, self.about)
        write_file(self.job.folder / CSV_NAME, rows)
        write_file(self.job.folder / JSON_NAME, document)

    def meet(self, surroundings: Surroundings) -> None:
        """Record the machine and versions that the first process reports."""
        if self.surroundings is not None:
            return
        self.surroundings = surroundings
        if not self.job.compares_bits:
            self.forecaster = Forecaster(self.job, surroundings.device)


def list_runs(settings: Iterable[Setting], kind: ProcessKind, job: Job) -> tuple[Run, ...]:
    """Return the runs of processes of one kind, in order; empty if no setting needs that kind.

    Each repeat starts with `baseline` and runs the whole list, so that drift of the machine is visible. If bits are compared,
    there is one repeat, and `baseline` runs twice.
    """
    own = [setting for setting in settings if setting.process is kind and setting != BASELINE]
    if not own and kind is not ProcessKind.MAIN:
        return ()
    if job.compares_bits:
        return tuple(Run(setting=setting, repeat=0) for setting in (BASELINE, BASELINE, *own))
    size = job.baseline_every or max(1, len(own))
    listed: list[Setting] = []
    for begin in range(0, max(1, len(own)), size):
        listed += (BASELINE, *own[begin : begin + size])
    if job.baseline_every and own:
        listed.append(BASELINE)
    return tuple(Run(setting=setting, repeat=repeat) for repeat in range(job.repeats) for setting in listed)


def collect_results(results: Results, settings: Sequence[Setting], *, on_message: Callable[[Message], None]) -> None:
    """Run all settings, and add each outcome to `results` and its files as soon as it is known.

    Args:
        results: Receives the outcomes.
        settings: Settings to run; `baseline` may be missing.
        on_message: Called with each message of rank 0 of each session.
    """

    def hear(message: Message) -> None:
        if isinstance(message, Surroundings):
            results.meet(message)
        on_message(message)

    for kind in ProcessKind:
        runs = list_runs(settings, kind, results.job)
        first = 1 + max((outcome.session for outcome in results.outcomes), default=-1)
        for outcome in run_sessions(results.job, runs, kind=kind, first_session=first, on_message=hear):
            results.add(outcome)
