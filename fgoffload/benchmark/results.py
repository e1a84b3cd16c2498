"""A whole benchmark: settings in turn, kind of process by kind of process, and files that are up to date after each of them.

[Note: The plain step of a benchmark]
A profile that is measured here takes the plain step from the `nothing` before it, and what it predicts is as long as that is.
But `nothing` built anew is another one: on an H100 thirteen of one run took 546 to 583 ms, the first the least. So when all
has run, the profile gets the median of all steps of `nothing` in processes of its kind, and everything is predicted again.
Plans were made before; what they are made of, the times of layers and copies, stays. A profile that was given stays as it is.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fgoffload.benchmark.job import Ended, Job, Message, Purpose, Ready, Run
from fgoffload.benchmark.measurement import Outcome, Summary, find_nothing_s, summarize
from fgoffload.benchmark.prediction import Forecast, Source, compare
from fgoffload.benchmark.processes import run_sessions
from fgoffload.benchmark.report import Workload, format_csv, format_json
from fgoffload.benchmark.search import SearchResult
from fgoffload.benchmark.settings import NOTHING, PROFILE, ProcessKind, Setting
from fgoffload.benchmark.surroundings import Surroundings, find_hardware
from fgoffload.output_files import write_file

if TYPE_CHECKING:
    from fgoffload.benchmark.forecaster import Forecaster

CSV_NAME, JSON_NAME, MARKDOWN_NAME, PICTURE_NAME = "results.csv", "run.json", "results.md", "frontier.png"
PREDICTIONS_NAME, SEARCH_NAME, TRACES_NAME, BITS_NAME = "predictions.md", "search.md", "traces.md", "bits.md"
"""Of the files in a benchmark's folder."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Results:
    """What is known of a benchmark so far."""

    workload: Workload
    """What is trained."""
    about: Mapping[str, Any]
    """Date, command and whatever else stands in the JSON file."""
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    """In the order in which they ran."""
    processes: list[ProcessKind] = dataclasses.field(default_factory=list)
    """By session."""
    repeats: int | None = None
    """Of the whole list; None until it runs."""
    surroundings: Surroundings | None = None
    """What it runs on; None until a process has said so."""
    search: SearchResult | None = None
    """What a search for Megatron-Core's flags found, where there was one."""
    forecaster: "Forecaster | None" = None
    """Predicts settings, or None where bits are compared."""
    forecasts: dict[Setting, Forecast] = dataclasses.field(default_factory=dict)
    """By setting: those that were measured."""

    def add(self, outcome: Outcome, process: ProcessKind) -> None:
        """Take note of what came of a run."""
        while len(self.processes) <= outcome.session:
            self.processes.append(process)
        self.outcomes.append(outcome)
        if self.forecaster is None or outcome.measurement is None:
            return
        if outcome.setting == PROFILE:
            self.forecaster.read_profile()
            self._predict_again(self.forecaster)
        elif outcome.setting not in self.forecasts:
            self.forecasts[outcome.setting] = self.forecaster.predict(outcome.setting)

    def renew_plain_step(self) -> None:
        """Predict again from a profile that was measured here, when all has run. See [Note: The plain step of a benchmark]."""
        if self.forecaster is None or not any(one.setting == PROFILE and one.measurement for one in self.outcomes):
            return
        plain_step_s = find_nothing_s(one for one in self.outcomes if self.processes[one.session] is PROFILE.process)
        if plain_step_s is not None:
            self.forecaster.renew_plain_step(plain_step_s)
            self._predict_again(self.forecaster)

    def _predict_again(self, forecaster: "Forecaster") -> None:
        self.forecasts = {setting: forecaster.predict(setting) for setting in self.forecasts}

    def meet(self, surroundings: Surroundings) -> None:
        """Take note of what the benchmark runs on, as its first process found it."""
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
        """Write the files that hold what was measured."""
        rows = format_csv(self.outcomes, self.processes, self.workload, self.forecasts)
        compared = [one.to_fields() for source in Source for one in compare(self.summarize(), self.forecasts, source)]
        about = {**self.about, "predictions": compared}
        document = format_json(self.outcomes, self.processes, self.workload, self.surroundings, about)
        for name, text in ((CSV_NAME, rows), (JSON_NAME, document)):
            write_file(folder / name, text)


def list_runs(
    settings: Iterable[Setting],
    kind: ProcessKind,
    *,
    purpose: Purpose,
    repeats: int,
    nothing_every: int | None = None,
) -> tuple[Run, ...]:
    """Return what processes of one kind run, in order; nothing where none of the settings is theirs.

    The whole list comes again in each repeat, so that drifts of the machine show, and `nothing` begins each of them. Where bits
    are compared there is one repeat, and `nothing` comes twice. A profile is measured once.

    Args:
        settings: Of all kinds of processes.
        kind: Of these.
        purpose: Of the benchmark.
        repeats: Of the whole list.
        nothing_every: `nothing` comes again behind so many settings, and at the end of each repeat. None: never.
    """
    own = [setting for setting in settings if setting.process is kind and setting != NOTHING]
    if not own and kind is not ProcessKind.MAIN:
        return ()
    if purpose is Purpose.BITS:
        return tuple(Run(setting=setting, repeat=0) for setting in (NOTHING, NOTHING, *own))
    runs = []
    for repeat in range(repeats):
        listed = [setting for setting in own if setting != PROFILE or repeat == 0]
        size = nothing_every or max(1, len(listed))
        for begin in range(0, max(1, len(listed)), size):
            runs += [Run(setting=setting, repeat=repeat) for setting in (NOTHING, *listed[begin : begin + size])]
        if nothing_every and listed:
            runs.append(Run(setting=NOTHING, repeat=repeat))
    return tuple(runs)


def collect_results(
    results: Results,
    job: Job,
    settings: Sequence[Setting],
    *,
    repeats: int,
    folder: Path,
    on_message: Callable[[Message], None],
    nothing_every: int | None = None,
) -> None:
    """Run all settings, and let `results` and its files have what came of each as soon as it is known.

    Args:
        results: Filled.
        job: What is measured.
        settings: `nothing` needs not be among them.
        repeats: Of the whole list.
        folder: For the files, and the logs of the processes.
        on_message: Called with what rank 0 of each session says.
        nothing_every: As `list_runs` takes it.
    """
    results.repeats = repeats

    def hear(message: Message) -> None:
        if isinstance(message, Ready):
            results.meet(message.surroundings)
        if not isinstance(message, Ended):
            on_message(message)

    for kind in ProcessKind:
        runs = list_runs(settings, kind, purpose=job.purpose, repeats=repeats, nothing_every=nothing_every)
        first = len(results.processes)
        for outcome in run_sessions(job, runs, kind=kind, first_session=first, log_folder=folder, on_message=hear):
            results.add(outcome, kind)
            results.write(folder)
    if not job.steps_until_replay:  # a profile has no graphs, which `nothing` has
        results.renew_plain_step()
    results.write(folder)
