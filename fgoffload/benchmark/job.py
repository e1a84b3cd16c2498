"""Options and runs of a benchmark, and the messages of its processes. All of them can be pickled."""

import dataclasses
import re
from pathlib import Path

from fgoffload.benchmark.measurement import Outcome, Run
from fgoffload.benchmark.settings import ProcessKind, Setting
from fgoffload.benchmark.surroundings import Surroundings


def make_file_name(name: str) -> str:
    """Replace the characters of a setting's name that are unsuitable for a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name)


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
    world_size: int | None = None
    """Number of processes of the training; None for the fewest that one copy of the model needs."""
    warmup: int
    """Number of steps before the timed ones."""
    steps: int
    """Number of timed steps, or of all steps if bits are compared."""
    repeats: int = 1
    """Number of repeats of the whole list of settings."""
    baseline_every: int | None = None
    """Settings between two runs of `baseline`, which then also ends each repeat. None for one run a repeat."""
    steps_until_replay: int = 0
    """Number of steps before all steps replay CUDA graphs: eager steps and the capture step. 0 without graphs."""
    compares_bits: bool = False
    """Whether to compare losses and gradients, with deterministic kernels, in place of times."""
    has_optimizer: bool = False
    """Whether a step updates the parameters."""
    folder: Path
    """Folder of all output."""
    profile: Path | None = None
    """Path of the profile to plan and predict from."""
    measures_profile: bool = False
    """Whether the benchmark measures that profile, before the settings."""
    writes_traces: bool = False
    """Whether to write a Chrome trace of each setting."""

    @property
    def warmup_steps(self) -> int:
        """Number of steps before the timed ones. No timed step captures a graph or replays one for the first time."""
        return max(self.warmup, self.steps_until_replay + 1)

    @property
    def steps_of_run(self) -> int:
        """Number of steps of each setting. If bits are compared, graphs replay in the last one."""
        return max(self.steps, self.steps_until_replay + 1) if self.compares_bits else self.warmup_steps + self.steps

    def find_plan_path(self, setting: Setting, *, rank: int = 0) -> Path:
        """Return the path of the plan for a budget. All ranks write the same plan, each to its own file, so that none waits."""
        return self.folder / f"plan_{make_file_name(setting.name)}_rank{rank}.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Description of the training, for titles and rates."""

    arguments_file: str
    """Path of the argument file, as the user typed it."""
    layers: int
    """Number of decoder layers."""
    tokens: int
    """Tokens of a step, over all ranks."""
    world_size: int
    """Number of processes of the training."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Work of one process of a benchmark."""

    job: Job
    """The benchmark's options."""
    runs: tuple[Run, ...]
    """Runs of the process, in order."""
    kind: ProcessKind
    """Kind of the process, with the environment variables to set before heavy imports."""
    session: int
    """Number of its session."""
    rank: int
    """Rank of this process, from 0."""
    store: Path
    """File through which the ranks connect."""
    log: Path
    """Path of the log file for the process's output."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
    """A step has ended."""

    loss: float | None
    """Its mean loss; None for a step of a profile or of a plan's trial, which belongs to no run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Crashed:
    """The process ended before it finished its runs."""

    reason: str
    """Reason in one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """All runs have ended."""


Message = Surroundings | Run | Stepped | Outcome | Crashed | Finished
"""Any message from a process. It sends its machine and versions once it is ready, each run as it begins, and its outcome."""
