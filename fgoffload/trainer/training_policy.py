"""How a training runs, where a comparison of bits and a measurement of time want different things."""

import dataclasses
import enum


class Kernels(enum.Enum):
    """Which kernels compute."""

    DETERMINISTIC = "deterministic"  # the same bits every time, and slower: for comparisons
    FASTEST = "fastest"  # whatever torch and Transformer Engine choose by themselves: for times


class Update(enum.Enum):
    """Treatment of a step's gradients."""

    ADAMW = "adamw"  # updates the parameters
    NONE = "none"  # leaves them: forward and backward alone, without the memory of an optimizer


class Engine(enum.Enum):
    """The engine that offloads what the flags select."""

    OURS = "ours"  # this package's engine, also at Megatron's own call sites
    MEGATRON = "megatron"  # Megatron-Core's own: see `megatron_engine`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPolicy:
    """The choices of a training that change neither its model nor its data. The defaults are for comparing bits."""

    kernels: Kernels = Kernels.DETERMINISTIC
    """Which kernels compute."""
    update: Update = Update.ADAMW
    """Treatment of a step's gradients."""
    engine: Engine = Engine.OURS
    """The engine that offloads, if any."""


DEFAULT_POLICY = TrainingPolicy()
"""The policy of `fgoffload train`."""
