"""Options of a benchmark, and the messages of its processes. All of them can be pickled."""

import dataclasses
import re
from pathlib import Path

from fgoffload.benchmark.measurement import Outcome, Run
from fgoffload.benchmark.settings import Setting
from fgoffload.benchmark.surroundings import Surroundings


def make_file_name(name: str) -> str:
    """Replace the characters in a setting's name that are unsuitable for a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Options that apply to all settings of a benchmark."""

    source: str
    """Path of the argument file, as the user typed it."""
    file_flags: tuple[str, ...]
    typed_flags: tuple[str, ...] = ()
    """Megatron's flags on the command line. They override the file's flags; a setting's flags override both."""
    own_flags: tuple[str, ...] = ()
    """Flags of `fgoffload bench` itself, which errors can suggest for a misspelled flag."""
    world_size: int | None = None
    """Number of training processes; None for the minimum that one copy of the model needs."""
    warmup: int
    steps: int
    """Number of timed steps, or of all steps in a bitwise comparison."""
    repeats: int = 1
    baseline_every: int | None = None
    """Number of settings between runs of `baseline`, which also ends each repeat. With None, it runs once per repeat."""
    steps_until_replay: int = 0
    """Number of eager and capture steps before the first step that only replays CUDA graphs. 0 without graphs."""
    compares_bits: bool = False
    """Whether to compare losses and gradients with deterministic kernels instead of measuring times."""
    has_optimizer: bool = False
    """Whether each step updates the parameters."""
    folder: Path
    profile: Path | None = None
    """Profile used for planning and prediction."""
    measures_profile: bool = False
    writes_traces: bool = False

    @property
    def warmup_steps(self) -> int:
        """Number of untimed steps, including the first replay of CUDA graphs."""
        return max(self.warmup, self.steps_until_replay + 1)

    @property
    def steps_of_run(self) -> int:
        """Number of steps of each setting. In a bitwise comparison, the last one replays graphs."""
        return max(self.steps, self.steps_until_replay + 1) if self.compares_bits else self.warmup_steps + self.steps

    def find_plan_path(self, setting: Setting, *, rank: int = 0) -> Path:
        """Return the path of a budget's plan file. Each rank writes its own file, so no rank waits for another."""
        return self.folder / f"plan_{make_file_name(setting.name)}_rank{rank}.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Size of the training run, for titles and throughput."""

    arguments_file: str
    layers: int
    tokens: int
    """Tokens per step over all ranks."""
    world_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
    """Message that a step has ended."""

    loss: float | None
    """Mean loss of the step; None while a profile is measured or a plan is tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class Crashed:
    """Message that the process ended before it finished its runs."""

    reason: str


Message = Surroundings | Run | Stepped | Outcome | Crashed
"""Message from a process: its surroundings, each run when it starts, each step and outcome when it ends, or a crash."""
