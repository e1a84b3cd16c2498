"""Adds the flags of fine-grained activation offload to any parser."""

import argparse
import contextlib
from typing import Any

from fgoffload.integrations.megatron.flags.field_flags import number, whole_number

_SWITCH = {"action": argparse.BooleanOptionalAction, "default": False}
_FLAGS: dict[str, dict[str, Any]] = {
    "--fine-grained-activation-offloading": {**_SWITCH, "help": "switch offload on"},
    "--offload-modules": {"nargs": "*", "default": [], "metavar": "TAG", "help": "tags to offload, or auto"},
    "--min-offloaded-tensor-size": {
        "type": whole_number,
        "metavar": "ELEMENTS",
        "help": "smaller storages stay on the GPU (1048576)",
    },
    "--delay-offload-until-cuda-graph": {**_SWITCH, "help": "offload once the next CUDA graph is launched"},
    "--delta-offload-bytes-across-pp-ranks": {
        "type": whole_number,
        "metavar": "BYTES",
        "help": "offload fewer bytes on each later pipeline rank (0)",
    },
    "--activation-offload-fraction": {
        "type": number,
        "metavar": "PART",
        "help": "part of a chunk's sites to offload, 0 to 1 (1.0)",
    },
    "--offload-plan": {"metavar": "FILE", "help": "plan file, instead of a fraction"},
    "--offload-memory-budget": {"metavar": "SIZE", "help": "GPU memory that --offload-modules auto plans for, as in 60GiB"},
    "--offload-host-budget": {"metavar": "SIZE", "help": "host memory limit of each rank, as in 64GiB"},
    "--offload-window": {"metavar": "SIZE", "help": "bytes in flight to the host before compute waits (1GiB)"},
    "--offload-prefetch": {"metavar": "SIZE", "help": "bytes to reload ahead of backward (512MiB)"},
}
"""Each flag, with its options for argparse."""


def add_fine_grained_offload_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of fine-grained activation offload to `parser`, and return it.

    Usable as Megatron-LM's `extra_args_provider`. A flag that the parser has already is not changed. Pass the parsed flags to
    `OffloadConfig.from_flags`.
    """
    group = parser.add_argument_group("fine-grained activation offload")
    for flag, options in _FLAGS.items():
        # argparse has no public way to ask whether a flag exists; Megatron-LM registers some of these itself.
        with contextlib.suppress(argparse.ArgumentError):
            group.add_argument(flag, **options)
    return parser
