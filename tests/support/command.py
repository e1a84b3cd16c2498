"""Shared helpers for tests of the command line."""

import re
from pathlib import Path

ARGUMENTS = str(Path(__file__).parents[2] / "arguments" / "tiny_moe.sh")
OFF = (
    "#!/usr/bin/env bash\nARGS=(--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1)\n"
)
"""An argument file without offload flags."""


def assert_messages(said, *expected):
    """Check what stderr holds, but for the one line that says what was replaced, which differs between machines."""
    lines = said.splitlines()
    replaced = [line for line in lines if re.fullmatch(r"fgoffload: Megatron-Core.* functions .*are replaced\.", line)]
    assert len(replaced) == 1
    assert [line for line in lines if line not in replaced] == list(expected)
