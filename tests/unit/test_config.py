"""Tests `OffloadConfig`: its fields, flags and errors."""

import argparse
from pathlib import Path

import pytest

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.tags import default_tags
from fgoffload.transfer_schedule import TransferPolicy

pytestmark = pytest.mark.quick

ALL_TAGS = " ".join(default_tags().names)

REFUSALS = [
    (
        {"offload_modules": ()},
        "--fine-grained-activation-offloading is on, but --offload-modules is empty, so nothing would be offloaded. Add at "
        f"least one of: {ALL_TAGS}.",
    ),
    (
        {"offload_modules": ("core_atn",)},
        f"--offload-modules 'core_atn' is not a tag. Did you mean 'core_attn'? Valid tags: {ALL_TAGS}.",
    ),
    ({"offload_modules": ("attn_proj",)}, "--offload-modules 'attn_proj' needs 'core_attn': both save the same storage"),
    ({"offload_modules": ("moe_act", "moe_act")}, "--offload-modules lists 'moe_act' twice. List each tag once."),
    (
        {"min_offloaded_tensor_size": -1},
        "--min-offloaded-tensor-size -1 is below 0. Use 0 or more; 0 offloads storages of any size.",
    ),
    ({"activation_offload_fraction": 1.5}, "--activation-offload-fraction 1.5 is not between 0 and 1. Use, for example, 0.8."),
    ({"activation_offload_fraction": float("nan")}, "--activation-offload-fraction nan is not between 0 and 1. Use, for"),
    (
        {"activation_offload_fraction": True},
        "--activation-offload-fraction True is not a number. Use a fraction, for example 0.8.",
    ),
    ({"offload_host_budget_bytes": "64GiB"}, "--offload-host-budget '64GiB' is not a whole number of bytes. Pass an"),
    ({"offload_host_budget_bytes": 0}, "--offload-host-budget 0 leaves no host memory. Use a size above 0, such as 64GiB."),
    ({"offload_plan": Path("plan.json"), "activation_offload_fraction": 0.5}, "--offload-plan and"),
    ({"offload_window_bytes": -1}, "--offload-window -1 is below 0 bytes. Use 0 or a size, for example 512MiB."),
    ({"offload_modules": ("auto",)}, "--offload-modules auto needs a memory budget. Add"),
    ({"offload_modules": ("auto", "core_attn"), "offload_memory_budget_bytes": 1}, "--offload-modules lists auto and"),
    (
        {"offload_modules": ("auto",), "offload_memory_budget_bytes": 1, "offload_plan": Path("plan.json")},
        "--offload-modules auto and --offload-plan both choose what to offload. Use one of them.",
    ),
    ({"offload_memory_budget_bytes": 2**30}, "--offload-memory-budget 1.00 GiB has no effect without --offload-modules auto"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS, ids=[str(next(iter(fields.items()))) for fields, _ in REFUSALS])
def test_invalid_values_are_rejected_with_flag_value_limit_and_fix(fields, message):
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(**{"offload_modules": ("core_attn",), **fields})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("tag", "module"), [("core_attn", "core_attn"), ("expert_fc1", "moe"), ("moe_act", "moe")])
def test_a_tag_with_recomputed_tensors_is_rejected(tag, module):
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(offload_modules=(tag,)).check_recompute(["layernorm", module])
    assert str(caught.value) == (
        f"--offload-modules {tag!r} and --recompute-modules {module!r} are mutually exclusive: recomputed tensors are not "
        "saved, so nothing would be offloaded. Remove one of them."
    )


def test_every_flag_sets_its_config_field():
    flags = argparse.Namespace(
        fine_grained_activation_offloading=True,
        offload_modules=["core_attn", "attn_proj"],
        min_offloaded_tensor_size=0,
        activation_offload_fraction=0.0,
        offload_host_budget="64GiB",
        offload_window="0",
        offload_prefetch="512 MiB",
    )
    config = OffloadConfig.from_flags(flags)
    assert config == OffloadConfig(
        offload_modules=("core_attn", "attn_proj"),
        min_offloaded_tensor_size=0,
        activation_offload_fraction=0.0,
        offload_host_budget_bytes=64 * 2**30,
        offload_window_bytes=0,
        offload_prefetch_bytes=512 * 2**20,
    )
    assert config.transfer_policy == TransferPolicy(window_bytes=0, prefetch_bytes=512 * 2**20)


@pytest.mark.parametrize("flag", ["offload_host_budget", "offload_window", "offload_prefetch", "offload_memory_budget"])
def test_an_invalid_size_is_rejected_with_its_flag(flag):
    flags = argparse.Namespace(fine_grained_activation_offloading=True, offload_modules=["core_attn"], **{flag: "60PB"})
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_flags(flags)
    assert str(caught.value) == (
        f"--{flag.replace('_', '-')} '60PB' is not a size. Use B, KiB, MiB, GiB, TiB or GB as the unit, for example 60GiB."
    )


def test_auto_excludes_megatrons_recompute_flags():
    config = OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=2**30)
    assert config.is_auto
    config.check_recompute(())
    with pytest.raises(ConfigError, match="--offload-modules auto chooses recompute layer by layer, but --recompute-m"):
        config.check_recompute(("moe", "core_attn"))


def test_a_plan_file_may_be_a_string():
    assert OffloadConfig(offload_modules=(), offload_plan="plan.json").offload_plan == Path("plan.json")
