"""Choices for running a training: a bitwise comparison and a timing measurement need different ones."""

import dataclasses
import enum


class Kernels(enum.Enum):
    """Kinds of kernels."""

    DETERMINISTIC = "deterministic"  # bitwise reproducible but slower: for comparisons
    FASTEST = "fastest"  # the default choice of torch and Transformer Engine: for times


class Update(enum.Enum):
    """Treatment of a step's gradients."""

    ADAMW = "adamw"  # updates the parameters
    NONE = "none"  # leaves them unchanged: forward and backward only, without optimizer memory


class Engine(enum.Enum):
    """The engine that offloads what the flags select."""

    OURS = "ours"  # this package's engine, also at Megatron's own call sites
    MEGATRON = "megatron"  # Megatron-Core's own: see `megatron_engine`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPolicy:
    """Choices of a training that change neither its model nor its data. The defaults are for bitwise comparison."""

    kernels: Kernels = Kernels.DETERMINISTIC
    """Kind of kernels to use."""
    update: Update = Update.ADAMW
    """Treatment of a step's gradients."""
    engine: Engine = Engine.OURS
    """The engine that offloads, if any."""


DEFAULT_POLICY = TrainingPolicy()
"""The policy of `fgoffload train`."""
