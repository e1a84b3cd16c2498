"""Offload for transformers' `Trainer` and for the trainers of TRL, which are made of it.

Trainer(model, args, train_dataset=..., callbacks=[OffloadCallback()])
"""

from fgoffload.integrations.transformers.callback import OffloadCallback

__all__ = ["OffloadCallback"]
