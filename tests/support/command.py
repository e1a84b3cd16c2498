"""Shared helpers for tests of the command line."""

import re
from pathlib import Path

ARGUMENTS = str(Path(__file__).parents[2] / "arguments" / "tiny_moe.sh")
OFF = (
    "#!/usr/bin/env bash\nARGS=(--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1)\n"
)
"""An argument file without offload flags."""


def assert_messages(stderr, *expected):
    """Check the lines of `stderr`, without the one about replaced functions, which differs between machines."""
    lines = stderr.splitlines()
    replaced = [line for line in lines if re.fullmatch(r"fgoffload: Megatron-Core.* functions .*are replaced\.", line)]
    assert len(replaced) == 1
    assert [line for line in lines if line not in replaced] == list(expected)
