"""Registers our callback under ms-swift's name, so that the key `activation_cpu_offload` of its FSDP config gets ours."""

from typing import Any

from swift.callbacks import callbacks_map

from fgoffload.integrations.transformers import OffloadCallback


class SwiftOffloadCallback(OffloadCallback):
    """The same callback, made as ms-swift makes its own."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__()


callbacks_map["activation_cpu_offload"] = SwiftOffloadCallback
