"""Megatron's flags as plans, the settings to compare with, and the flags that come nearest to a plan."""

import pytest

from fgoffload import ConfigError
from fgoffload.planner.solving.megatron_flags import (
    FullMethod,
    FullRecompute,
    MegatronFlags,
    SelectiveRecompute,
)


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
def test_flags_are_the_words_that_megatron_takes(flags, words):
    assert " ".join(flags.list_arguments()) == words


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelectiveRecompute(modules=("nothing",)), "--recompute-modules 'nothing'"),
        (lambda: FullRecompute(method=FullMethod.UNIFORM, layers=2), "--recompute-num-layers 2 with uniform"),
        (lambda: FullRecompute(method=FullMethod.BLOCK, layers=0), "--recompute-num-layers 0 with block"),
    ],
)
def test_what_flags_cannot_say_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
