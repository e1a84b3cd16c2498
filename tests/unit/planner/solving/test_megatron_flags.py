"""Tests the command line arguments of Megatron's recompute and offload flags."""

import pytest

from fgoffload.planner.solving.megatron_flags import FullMethod, FullRecompute, MegatronFlags, SelectiveRecompute


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (MegatronFlags(), ""),
        (
            MegatronFlags(offload_modules=("core_attn", "attn_proj"), activation_offload_fraction=0.5),
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj --activation-offload-fraction 0.5",
        ),
        (
            MegatronFlags(recompute=SelectiveRecompute(modules=("layernorm", "moe_act"))),
            "--recompute-granularity selective --recompute-modules layernorm moe_act",
        ),
        (
            MegatronFlags(recompute=FullRecompute(method=FullMethod.BLOCK, layers=3)),
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        ),
    ],
)
def test_flags_are_written_as_megatron_arguments(flags, words):
    assert " ".join(flags.list_arguments()) == words
