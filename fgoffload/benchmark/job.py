"""Requests to the processes of a benchmark, and their messages. All of it can be pickled."""

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
    """Return the name of a setting as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name)


def name_trace(setting: Setting, *, rank: int = 0) -> str:
    """Return the name of the file that a rank's trace of a setting goes to."""
    own = f"_rank{rank}" if rank else ""
    return f"trace_{make_file_name(setting.name)}{own}.json.gz"


class Purpose(enum.Enum):
    """The purpose of a benchmark."""

    TIMES = "times"  # step times and memory, with the fastest kernels
    BITS = "bits"  # losses and gradients, with deterministic ones


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One setting, to be measured once."""

    setting: Setting
    repeat: int
    """Repeat of the whole list, from 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Options that all settings of a benchmark share."""

    source: str
    """The argument file, as the user named it."""
    file_flags: tuple[str, ...]
    """Megatron's flags in that file."""
    typed_flags: tuple[str, ...] = ()
    """Megatron's flags on the command line; they win over the file's, and a setting's over both."""
    own_flags: tuple[str, ...] = ()
    """The flags of the command itself, to be suggested for one typed wrongly."""
    world_size: int = 1
    """Processes of the training."""
    warmup: int
    """Steps before the timed ones."""
    steps: int
    """Timed steps; where bits are compared, all steps."""
    steps_until_replay: int = 0
    """Steps before CUDA graphs only replay: eager ones, and the one that captures. 0 where none are captured."""
    purpose: Purpose = Purpose.TIMES
    """The purpose."""
    update: Update = Update.NONE
    """How steps use their gradients."""
    plan_folder: Path
    """Where the plans of the planner go, and a profile that is measured."""
    profile: Path | None = None
    """A profile that was measured before, to plan from."""
    trace_folder: Path | None = None
    """Where a Chrome trace of each setting goes, or None for none."""

    @property
    def warmup_steps(self) -> int:
        """Steps before the timed ones: none of those captures a graph, or is the first to replay one."""
        return max(self.warmup, self.steps_until_replay + 1)

    @property
    def bit_steps(self) -> int:
        """Steps whose bits are compared: graphs replay in the last one."""
        return max(self.steps, self.steps_until_replay + 1)

    @property
    def steps_of_run(self) -> int:
        """Steps that each setting takes."""
        return self.bit_steps if self.purpose is Purpose.BITS else self.warmup_steps + self.steps

    @property
    def profile_path(self) -> Path:
        """Where a profile goes that is measured among the settings."""
        return self.plan_folder / "profile.json"

    def find_plan_path(self, setting: Setting, *, rank: int = 0) -> Path:
        """Return where the plan for a budget goes: a file for each rank, since all write the same and none waits."""
        return self.plan_folder / f"plan_{make_file_name(setting.name)}_rank{rank}.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of one process."""

    job: Job
    """The benchmark's options."""
    runs: tuple[Run, ...]
    """In this order."""
    rank: int
    """Rank of this process, from 0."""
    store: Path
    """A file by which the ranks meet."""
    environment: Mapping[str, str | None]
    """Variables that it sets before anything heavy is imported; None removes one."""
    log: Path
    """Where its output goes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """The process has loaded what it needs."""

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
    """A step of a plan that is tried is over: it is not among those of the run, and says that the process goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A run is over, and the process goes on."""

    run: Run
    measurement: Measurement | None = None
    """Where times are measured."""
    bits: tuple[StepRecord, ...] = ()
    """By step, where bits are compared."""
    failure: str = ""
    """Why there is neither."""


@dataclasses.dataclass(frozen=True, slots=True)
class Crashed:
    """The process is over before its runs are."""

    reason: str
    """In one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """All runs are over."""


Message = Ready | Began | Stepped | Rehearsed | Ended | Crashed | Finished
"""A message of a process."""
