"""Names Megatron's interface class, and rejects calls to methods that this version does not support."""

from collections.abc import Callable
from typing import Any, NoReturn

from fgoffload.errors import IntegrationError

INTERFACE = "megatron.core.pipeline_parallel.fine_grained_activation_offload:FineGrainedActivationOffloadingInterface"
"""Path of Megatron's class, as `Patches` takes it."""
INTERFACE_PATH = INTERFACE.replace(":", ".")
SUPPORTED = "megatron-core 0.16.1 to 0.18, which end groups by group_commit, and 0.19 or newer, which end them by group_offload"
"""Supported versions, for errors."""


def refuse_unknown(name: str) -> Callable[..., NoReturn]:
    """Return a replacement for the method `name` of Megatron's interface, which no known generation has. It raises."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise IntegrationError(
            f"{INTERFACE_PATH}.{name} is called, which this version does not support. Supported: {SUPPORTED}."
        )

    return refuse
