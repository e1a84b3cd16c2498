"""Callback for transformers' `Trainer`, and for TRL's trainers, which derive from it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fgoffload.integrations.transformers.callback import OffloadCallback

__all__ = ["OffloadCallback"]


def __getattr__(name: str) -> Any:
    # Imported on first use, since `launch` must not import transformers.
    if name in __all__:
        return getattr(importlib.import_module("fgoffload.integrations.transformers.callback"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
