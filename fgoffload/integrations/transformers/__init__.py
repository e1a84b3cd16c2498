"""Offload for transformers' `Trainer` and TRL's trainers, which derive from it.

Trainer(model, args, train_dataset=..., callbacks=[OffloadCallback()])
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fgoffload.integrations.transformers.callback import OffloadCallback

__all__ = ["OffloadCallback"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, since `launch` must not import transformers.
    if name in __all__:
        return getattr(importlib.import_module("fgoffload.integrations.transformers.callback"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
