"""Tests names of benchmark settings, their flags, and errors."""

import pytest

from fgoffload import ConfigError
from fgoffload.benchmark.settings import BASELINE, choose_settings, list_default_settings, parse_setting

OFF = "--no-fine-grained-activation-offloading"
ON = "--fine-grained-activation-offloading"
DELAY, NO_DELAY = "--delay-offload-until-cuda-graph", "--no-delay-offload-until-cuda-graph"
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
MOE = {"num_layers": 6, "num_moe_experts": 16, "moe_grouped_gemm": True, "transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("baseline", (OFF,)),
        ("recompute:full", (OFF, *FULL)),
        ("megatron:expert_fc1@0.5", (ON, "--offload-modules", "expert_fc1", "--activation-offload-fraction", "0.5", NO_DELAY)),
        ("megatron:expert_fc1~delay", (ON, "--offload-modules", "expert_fc1", "--activation-offload-fraction", "1.0", DELAY)),
        (
            "ours:expert_fc1+moe_act@0.5~delay/layernorm",
            (
                *(ON, "--offload-modules", "expert_fc1", "moe_act", "--activation-offload-fraction", "0.5", DELAY),
                *("--recompute-granularity", "selective", "--recompute-modules", "layernorm"),
            ),
        ),
        (
            "ours:core_attn+attn_proj/layernorm",
            (
                *(ON, "--offload-modules", "core_attn", "attn_proj", "--activation-offload-fraction", "1.0", NO_DELAY),
                *("--recompute-granularity", "selective", "--recompute-modules", "layernorm"),
            ),
        ),
        ("te-layers:3", (OFF, "--cpu-offloading", "--cpu-offloading-num-layers", "3")),
    ],
)
def test_a_setting_adds_the_flags_of_its_name(name, flags):
    setting = parse_setting(name)
    assert setting.list_flags() == flags
    assert setting.name == name


def test_a_budget_setting_without_a_plan_has_no_flags():
    with pytest.raises(ConfigError) as caught:
        parse_setting("budget:1MiB").list_flags()
    assert str(caught.value) == (
        "budget:1.00MiB needs a plan. Pass a plan file, for example plan:plan.json, or use fgoffload bench --budgets, which "
        "makes a plan."
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("megatrom:core_attn", "'megatrom:core_attn' is not a setting"),
        ("recompute", "--settings 'recompute' is not a valid recompute setting. Use, for example, recompute:full."),
        ("te-layers", "Use, for example, te-layers:3."),
        ("plan", "Use, for example, plan:plan.json."),
        ("baseline:much", "is not a valid baseline setting. Use, for example, baseline."),
        ("ours:expert_fc1@2", "'ours:expert_fc1@2': --activation-offload-fraction 2.0 is not between 0 and 1"),
        ("baseline~delay", "a fraction (@), ~delay and recompute (/) need megatron or ours with modules."),
        ("ours:expert_fc1~dela", "'ours:expert_fc1~dela' is not a setting"),
        ("ours:attn_proj", "'attn_proj' needs 'core_attn': both save"),
        ("ours:core_atn", "Did you mean 'core_attn'?"),
        ("budget:18.9PB", "--settings budget:18.9PB: '18.9PB' is not a size"),
    ],
)
def test_an_invalid_setting_is_rejected_with_a_fix(name, message):
    with pytest.raises(ConfigError) as caught:
        parse_setting(name)
    assert message in str(caught.value)


def test_a_system_name_selects_its_defaults_and_the_baseline_is_always_first():
    defaults = list_default_settings(MOE)
    chosen = choose_settings(["te-layers", "recompute:full", "recompute:full", "ours:router"], defaults)
    assert [setting.name for setting in chosen] == ["baseline", "te-layers:2", "te-layers:4", "recompute:full", "ours:router"]
    given = parse_setting("budget:1GiB")
    assert choose_settings([], defaults, [given]) == (*defaults, given)
    assert choose_settings(["baseline"], defaults, [given]) == (BASELINE, given)
