"""Requests to the processes of a benchmark, and their messages. All of them can be pickled."""

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
    """Return the name of a setting as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name)


def name_trace(setting: Setting, *, rank: int = 0) -> str:
    """Return the file name of a rank's trace of a setting."""
    own = f"_rank{rank}" if rank else ""
    return f"trace_{make_file_name(setting.name)}{own}.json.gz"


class Purpose(enum.Enum):
    """The purpose of a benchmark."""

    TIMES = "times"  # step times and memory, with the fastest kernels
    BITS = "bits"  # losses and gradients, with deterministic kernels


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement of one setting."""

    setting: Setting
    repeat: int
    """Repeat of the whole list, from 0."""


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
    """Number of timed steps; if bits are compared, of all steps."""
    steps_until_replay: int = 0
    """Steps before CUDA graphs only replay: eager steps and the capturing one. 0 without graphs."""
    purpose: Purpose = Purpose.TIMES
    """Purpose of the benchmark."""
    update: Update = Update.NONE
    """How steps use their gradients."""
    plan_folder: Path
    """Folder of the planner's plans and of a measured profile."""
    profile: Path | None = None
    """Path of an existing profile to plan from."""
    trace_folder: Path | None = None
    """Folder of a Chrome trace for each setting, or None for no traces."""

    @property
    def warmup_steps(self) -> int:
        """Steps before the timed ones, so that no timed step captures a graph or replays it for the first time."""
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
        """Path of a profile that is measured among the settings."""
        return self.plan_folder / "profile.json"

    def find_plan_path(self, setting: Setting, *, rank: int = 0) -> Path:
        """Return the path of the plan for a budget. Each rank has a file: all write the same plan and none waits."""
        return self.plan_folder / f"plan_{make_file_name(setting.name)}_rank{rank}.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of one process."""

    job: Job
    """The benchmark's options."""
    runs: tuple[Run, ...]
    """Runs of the process, in order."""
    rank: int
    """Rank of this process, from 0."""
    store: Path
    """File through which the ranks connect."""
    environment: Mapping[str, str | None]
    """Variables that the process sets before heavy imports; None removes one."""
    log: Path
    """Path of the process's output."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """The process has loaded its imports."""

    surroundings: Surroundings


@dataclasses.dataclass(frozen=True, slots=True)
class Began:
    """A run begins."""

    run: Run


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
    """A step is over."""

    loss: float


@dataclasses.dataclass(frozen=True, slots=True)
class Rehearsed:
    """A step of a plan's trial is over. It is not a step of the run, but shows that the process is alive."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A run is over, and the process goes on."""

    run: Run
    measurement: Measurement | None = None
    """Measurement, if times are measured."""
    bits: tuple[StepRecord, ...] = ()
    """Results of each step, if bits are compared."""
    failure: str = ""
    """Reason why there is neither."""


@dataclasses.dataclass(frozen=True, slots=True)
class Crashed:
    """The process ended before its runs did."""

    reason: str
    """Reason in one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """All runs are over."""


Message = Ready | Began | Stepped | Rehearsed | Ended | Crashed | Finished
"""A message of a process."""
