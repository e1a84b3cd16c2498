"""Options for running a training. Bitwise comparisons and timing measurements need different ones."""

import dataclasses
import enum


class Kernels(enum.Enum):
    """Selection of kernels."""

    DETERMINISTIC = "deterministic"  # bitwise reproducible but slower: for comparisons
    FASTEST = "fastest"  # the default choice of torch and Transformer Engine: for times


class Update(enum.Enum):
    """Parameter update at the end of a step."""

    ADAMW = "adamw"  # updates the parameters
    NONE = "none"  # leaves them unchanged: forward and backward only, without optimizer memory


class Engine(enum.Enum):
    """Engine that executes the offload flags."""

    OURS = "ours"  # this package's engine, also at Megatron's own call sites
    MEGATRON = "megatron"  # Megatron-Core's own: see `megatron_engine`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPolicy:
    """Options of a training that change neither its model nor its data. The defaults are for bitwise comparison."""

    kernels: Kernels = Kernels.DETERMINISTIC
    """Kernels to use."""
    update: Update = Update.ADAMW
    """Parameter update at the end of a step."""
    engine: Engine = Engine.OURS
    """Engine to use if offload is on."""


DEFAULT_POLICY = TrainingPolicy()
"""The policy of `fgoffload train`."""
