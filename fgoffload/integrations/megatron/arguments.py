"""Defines the command-line flags for activation offload, which can be added to any `argparse` parser."""

import argparse
import contextlib
from typing import Any

from fgoffload.defaults import DEFAULT_MIN_OFFLOADED_TENSOR_SIZE, DEFAULT_PREFETCH_BYTES, DEFAULT_WINDOW_BYTES
from fgoffload.integrations.megatron.flags.field_flags import number, whole_number
from fgoffload.units import format_bytes

_SWITCH = {"action": argparse.BooleanOptionalAction, "default": False}
_FLAGS: dict[str, dict[str, Any]] = {
    "--fine-grained-activation-offloading": {**_SWITCH, "help": "enable activation offload"},
    "--offload-modules": {"nargs": "*", "default": [], "metavar": "TAG", "help": "tags to offload, or auto"},
    "--min-offloaded-tensor-size": {
        "type": whole_number,
        "metavar": "ELEMENTS",
        "help": f"storages with fewer saved elements stay on the GPU (default {DEFAULT_MIN_OFFLOADED_TENSOR_SIZE})",
    },
    "--delay-offload-until-cuda-graph": {**_SWITCH, "help": "delay offload until the next CUDA graph is launched"},
    "--delta-offload-bytes-across-pp-ranks": {
        "type": whole_number,
        "metavar": "BYTES",
        "help": "how many fewer bytes each pipeline rank offloads than the previous rank (default 0)",
    },
    "--activation-offload-fraction": {
        "type": number,
        "metavar": "FRACTION",
        "help": "fraction of a model chunk's sites to offload, from 0 to 1 (default 1.0)",
    },
    "--offload-plan": {"metavar": "FILE", "help": "plan file with the actions for each layer"},
    "--offload-memory-budget": {"metavar": "SIZE", "help": "GPU memory budget for --offload-modules auto, such as 60GiB"},
    "--offload-host-budget": {"metavar": "SIZE", "help": "host memory limit per rank, such as 64GiB"},
    "--offload-window": {
        "metavar": "SIZE",
        "help": f"maximum bytes in flight to the host before compute waits (default {format_bytes(DEFAULT_WINDOW_BYTES)})",
    },
    "--offload-prefetch": {
        "metavar": "SIZE",
        "help": f"bytes to reload ahead of backward (default {format_bytes(DEFAULT_PREFETCH_BYTES)})",
    },
}
"""Keyword arguments of `add_argument` for each flag."""


def add_fine_grained_offload_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags for fine-grained activation offload to `parser`, and return the parser.

    Megatron-LM accepts this function as `extra_args_provider`. Flags that the parser already has are skipped. Pass the parsed
    flags to `OffloadConfig.from_flags`.
    """
    group = parser.add_argument_group("fine-grained activation offload")
    for flag, options in _FLAGS.items():
        # Megatron-LM registers some of these flags itself, and argparse has no public way to check whether a flag exists.
        with contextlib.suppress(argparse.ArgumentError):
            group.add_argument(flag, **options)
    return parser
