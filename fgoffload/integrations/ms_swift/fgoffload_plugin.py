"""Registers `OffloadCallback` in ms-swift, so that `activation_cpu_offload` in its FSDP config selects it."""

from typing import Any

from swift.callbacks import callbacks_map

from fgoffload.integrations.transformers import OffloadCallback


class SwiftOffloadCallback(OffloadCallback):
    """`OffloadCallback` with the constructor arguments of ms-swift's callbacks."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__()


callbacks_map["activation_cpu_offload"] = SwiftOffloadCallback
