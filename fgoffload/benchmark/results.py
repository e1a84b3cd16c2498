"""Runs a whole benchmark: settings in order for each kind of process. Result files are updated after each setting."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fgoffload.benchmark.job import Ended, Job, Message, Purpose, Ready, Run
from fgoffload.benchmark.measurement import Outcome, Summary, summarize
from fgoffload.benchmark.prediction import Prediction, Source
from fgoffload.benchmark.processes import run_sessions
from fgoffload.benchmark.report import Workload, format_csv, format_json
from fgoffload.benchmark.settings import BASELINE, PROFILE, ProcessKind, Setting
from fgoffload.benchmark.surroundings import Surroundings, find_hardware
from fgoffload.output_files import write_file

if TYPE_CHECKING:
    from fgoffload.benchmark.forecaster import Forecaster

CSV_NAME, JSON_NAME, PICTURE_NAME = "results.csv", "run.json", "frontier.png"
"""Names of the files in a benchmark's folder."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Results:
    """The results of a benchmark so far."""

    workload: Workload
    """Description of the training."""
    about: Mapping[str, Any]
    """Date, command and other metadata for the JSON file."""
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    """Outcomes in the order of their runs."""
    processes: list[ProcessKind] = dataclasses.field(default_factory=list)
    """Kind of process of each session."""
    repeats: int | None = None
    """Number of repeats of the whole list; None until the benchmark runs."""
    surroundings: Surroundings | None = None
    """Versions and device; None until a process reports them."""
    forecaster: "Forecaster | None" = None
    """Forecaster of the settings, or None if bits are compared."""
    predictions: dict[Setting, Mapping[Source, Prediction]] = dataclasses.field(default_factory=dict)
    """Predictions of the measured settings."""

    def add(self, outcome: Outcome, process: ProcessKind) -> None:
        """Record the outcome of a run."""
        while len(self.processes) <= outcome.session:
            self.processes.append(process)
        self.outcomes.append(outcome)
        if self.forecaster is None or outcome.measurement is None:
            return
        if outcome.setting == PROFILE:
            self.forecaster.read_profile()
            self.predictions = {setting: self.forecaster.predict(setting) for setting in self.predictions}
        elif outcome.setting not in self.predictions:
            self.predictions[outcome.setting] = self.forecaster.predict(outcome.setting)

    def meet(self, surroundings: Surroundings) -> None:
        """Record the machine and versions that the first process reports."""
        if self.surroundings is not None:
            return
        self.surroundings = surroundings
        if self.forecaster is not None:
            self.forecaster.meet(surroundings.device)
        hardware = find_hardware(surroundings.device)
        rate = hardware.bf16_flop_per_s if hardware is not None and self.workload.dtype == "bfloat16" else None
        self.workload = dataclasses.replace(self.workload, device_flop_per_s=rate)

    def summarize(self) -> tuple[Summary, ...]:
        """Return one summary for each setting and kind of process."""
        return summarize(self.outcomes, self.processes, repeats=self.repeats)

    def write(self, folder: Path) -> None:
        """Write the result files."""
        rows = format_csv(self.outcomes, self.processes, self.workload, self.predictions)
        document = format_json(self.outcomes, self.processes, self.workload, self.surroundings, self.about)
        for name, text in ((CSV_NAME, rows), (JSON_NAME, document)):
            write_file(folder / name, text)


def list_runs(
    settings: Iterable[Setting],
    kind: ProcessKind,
    *,
    purpose: Purpose,
    repeats: int,
    baseline_every: int | None = None,
) -> tuple[Run, ...]:
    """Return the runs of processes of one kind, in order; empty if no setting needs that kind.

    Each repeat starts with `baseline` and runs the whole list, so that drift of the machine is visible. If bits are compared,
    there is one repeat, and `baseline` runs twice. A profile is measured once.

    Args:
        settings: Settings of all kinds of processes.
        kind: Kind of the processes.
        purpose: Kind of result to measure.
        repeats: Number of repeats of the whole list.
        baseline_every: Settings between two runs of `baseline`, which then also ends each repeat. None for no further runs.
    """
    own = [setting for setting in settings if setting.process is kind and setting != BASELINE]
    if not own and kind is not ProcessKind.MAIN:
        return ()
    if purpose is Purpose.BITS:
        return tuple(Run(setting=setting, repeat=0) for setting in (BASELINE, BASELINE, *own))
    runs = []
    for repeat in range(repeats):
        listed = [setting for setting in own if setting != PROFILE or repeat == 0]
        size = baseline_every or max(1, len(listed))
        for begin in range(0, max(1, len(listed)), size):
            runs += [Run(setting=setting, repeat=repeat) for setting in (BASELINE, *listed[begin : begin + size])]
        if baseline_every and listed:
            runs.append(Run(setting=BASELINE, repeat=repeat))
    return tuple(runs)


def collect_results(
    results: Results,
    job: Job,
    settings: Sequence[Setting],
    *,
    repeats: int,
    folder: Path,
    on_message: Callable[[Message], None],
    baseline_every: int | None = None,
) -> None:
    """Run all settings, and add each outcome to `results` and its files as soon as it is known.

    Args:
        results: Receives the outcomes.
        job: The benchmark's options.
        settings: Settings to run; `baseline` may be missing.
        repeats: Number of repeats of the whole list.
        folder: Folder of the files and of the processes' logs.
        on_message: Called with each message of rank 0 of each session.
        baseline_every: See `list_runs`.
    """
    results.repeats = repeats

    def hear(message: Message) -> None:
        if isinstance(message, Ready):
            results.meet(message.surroundings)
        if not isinstance(message, Ended):
            on_message(message)

    for kind in ProcessKind:
        runs = list_runs(settings, kind, purpose=job.purpose, repeats=repeats, baseline_every=baseline_every)
        first = len(results.processes)
        for outcome in run_sessions(job, runs, kind=kind, first_session=first, log_folder=folder, on_message=hear):
            results.add(outcome, kind)
            results.write(folder)
