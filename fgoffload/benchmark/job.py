"""Tasks for the processes of a benchmark, and the messages that they send. All of them can be pickled."""

import dataclasses
import enum
import re
from collections.abc import Mapping
from pathlib import Path

from fgoffload.benchmark.measurement import Measurement
from fgoffload.benchmark.settings import Setting
from fgoffload.benchmark.steps import StepRecord
from fgoffload.benchmark.surroundings import Surroundings
from fgoffload.trainer.training_policy import Update


def make_file_name(name: str) -> str:
    """Replace the characters of a setting's name that are unsuitable for a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name)


def name_trace(setting: Setting, *, rank: int = 0) -> str:
    """Return the file name of one rank's trace of a setting."""
    own = f"_rank{rank}" if rank else ""
    return f"trace_{make_file_name(setting.name)}{own}.json.gz"


class Purpose(enum.Enum):
    """Kind of result that a benchmark measures."""

    TIMES = "times"  # step times and memory, with the fastest kernels
    BITS = "bits"  # losses and gradients, with deterministic kernels


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement of one setting."""

    setting: Setting
    repeat: int
    """Number of the repeat of the whole list, from 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Options that all settings of a benchmark share."""

    source: str
    """Path of the argument file, as the user typed it."""
    file_flags: tuple[str, ...]
    """Megatron's flags in that file."""
    typed_flags: tuple[str, ...] = ()
    """Megatron's flags on the command line. They override the file's flags; a setting's flags override both."""
    own_flags: tuple[str, ...] = ()
    """The command's own flags, for suggestions."""
    world_size: int = 1
    """Number of processes of the training."""
    warmup: int
    """Number of steps before the timed ones."""
    steps: int
    """Number of timed steps, or of all steps if bits are compared."""
    steps_until_replay: int = 0
    """Number of steps before all steps replay CUDA graphs: eager steps and the capture step. 0 without graphs."""
    purpose: Purpose = Purpose.TIMES
    """Kind of result to measure."""
    update: Update = Update.NONE
    """Parameter update at the end of a step, if any."""
    plan_folder: Path
    """Folder of the planner's plans and of a measured profile."""
    profile: Path | None = None
    """Path of an existing profile to plan from."""
    trace_folder: Path | None = None
    """Folder of the Chrome traces, one for each setting, or None for no traces."""

    @property
    def warmup_steps(self) -> int:
        """Number of steps before the timed ones. No timed step captures a graph or replays one for the first time."""
        return max(self.warmup, self.steps_until_replay + 1)

    @property
    def bit_steps(self) -> int:
        """Number of steps whose bits are compared. Graphs replay in the last one."""
        return max(self.steps, self.steps_until_replay + 1)

    @property
    def steps_of_run(self) -> int:
        """Number of steps of each setting."""
        return self.bit_steps if self.purpose is Purpose.BITS else self.warmup_steps + self.steps

    @property
    def profile_path(self) -> Path:
        """Path of the profile that the benchmark measures among the settings."""
        return self.plan_folder / "profile.json"

    def find_plan_path(self, setting: Setting, *, rank: int = 0) -> Path:
        """Return the path of the plan for a budget. All ranks write the same plan, each to its own file, so that none waits."""
        return self.plan_folder / f"plan_{make_file_name(setting.name)}_rank{rank}.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work of one process of a benchmark."""

    job: Job
    """The benchmark's options."""
    runs: tuple[Run, ...]
    """Runs of the process, in order."""
    rank: int
    """Rank of this process, from 0."""
    store: Path
    """File through which the ranks connect."""
    environment: Mapping[str, str | None]
    """Environment variables to set before heavy imports; None unsets one."""
    log: Path
    """Path of the log file for the process's output."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """The process has loaded its imports."""

    surroundings: Surroundings


@dataclasses.dataclass(frozen=True, slots=True)
class Began:
    """A run has started."""

    run: Run


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
    """A step has ended."""

    loss: float


@dataclasses.dataclass(frozen=True, slots=True)
class Rehearsed:
    """A step of a plan's trial has ended. It is not a step of the run, but shows that the process is alive."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A run has ended, and the process continues."""

    run: Run
    measurement: Measurement | None = None
    """Measurement, if times are measured."""
    bits: tuple[StepRecord, ...] = ()
    """Results of each step, if bits are compared."""
    failure: str = ""
    """Reason why there are no results."""


@dataclasses.dataclass(frozen=True, slots=True)
class Crashed:
    """The process ended before it finished its runs."""

    reason: str
    """Reason in one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """All runs have ended."""


Message = Ready | Began | Stepped | Rehearsed | Ended | Crashed | Finished
"""Any message from a process."""
