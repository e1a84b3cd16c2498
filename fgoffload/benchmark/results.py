"""Runs all settings of a benchmark, and writes the result files after each setting."""

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


@dataclasses.dataclass(slots=True, kw_only=True)
class Results:
    """The results of a benchmark so far."""

    job: Job
    workload: Workload
    about: Mapping[str, Any]
    """Date and command for the JSON file."""
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    surroundings: Surroundings | None = None
    """Machine and versions; None until a process reports them."""
    forecaster: Forecaster | None = None
    """Predicts the measured settings; None in a bitwise comparison, and until a process reports its device."""
    predictions: dict[Setting, Mapping[Source, Prediction]] = dataclasses.field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Record the outcome of a run, predict its setting, and write the result files."""
        self.outcomes.append(outcome)
        if self.forecaster is not None and outcome.measurement is not None and outcome.setting not in self.predictions:
            self.predictions[outcome.setting] = self.forecaster.predict(outcome.setting)
        rows = format_csv(self.outcomes, self.workload, self.predictions)
        document = format_json(self.outcomes, self.workload, self.surroundings, self.about)
        write_file(self.job.folder / CSV_NAME, rows)
        write_file(self.job.folder / JSON_NAME, document)


def list_runs(settings: Iterable[Setting], kind: ProcessKind, job: Job) -> tuple[Run, ...]:
    """Return the runs for one kind of process, in order. There are none if no setting needs that kind.

    Each repeat starts with `baseline` and runs the whole list, which shows whether the machine's speed drifts. A bitwise
    comparison has one repeat, in which `baseline` runs twice.
    """
    own = [setting for setting in settings if setting.process is kind and setting != BASELINE]
    if not own and kind is not ProcessKind.MAIN:
        return ()
    if job.compares_bits:
        return tuple(Run(setting=setting, repeat=0) for setting in (BASELINE, BASELINE, *own))
    listed: list[Setting] = []
    for index, setting in enumerate(own):
        if job.baseline_every and index % job.baseline_every == 0:
            listed.append(BASELINE)
        listed.append(setting)
    # With --baseline-every, `baseline` also ends each repeat.
    listed = [*listed, BASELINE] if job.baseline_every else [BASELINE, *listed]
    return tuple(Run(setting=setting, repeat=repeat) for repeat in range(job.repeats) for setting in listed)


def collect_results(results: Results, settings: Sequence[Setting], *, on_message: Callable[[Message], None]) -> None:
    """Run `settings` after `baseline`, and add each outcome to `results` as soon as it is known.

    `on_message` is called with every message from rank 0 in every session.
    """

    def receive(message: Message) -> None:
        if isinstance(message, Surroundings) and results.surroundings is None:
            results.surroundings = message
            if not results.job.compares_bits:
                results.forecaster = Forecaster(results.job, message.device)
        on_message(message)

    for kind in ProcessKind:
        runs = list_runs(settings, kind, results.job)
        first = 1 + max((outcome.session for outcome in results.outcomes), default=-1)
        for outcome in run_sessions(results.job, runs, kind=kind, first_session=first, on_message=receive):
            results.add(outcome)
