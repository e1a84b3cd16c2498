"""Names of settings, and the flags behind them."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload import ConfigError, default_tags
from fgoffload.benchmark.settings import (
    NOTHING,
    PROFILE,
    ProcessKind,
    Setting,
    System,
    check_names,
    check_plans,
    choose_settings,
    list_default_settings,
    parse_setting,
)

OFF = "--no-fine-grained-activation-offloading"
ON = "--fine-grained-activation-offloading"
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
MOE = {"num_layers": 6, "num_moe_experts": 16, "moe_grouped_gemm": True, "transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("nothing", (OFF,)),
        ("recompute:full", (OFF, *FULL)),
        (
            "recompute:layernorm+moe_act",
            (OFF, "--recompute-granularity", "selective", "--recompute-modules", "layernorm", "moe_act"),
        ),
        ("ours:layer_input/full", (ON, "--offload-modules", "layer_input", "--activation-offload-fraction", "1.0", *FULL)),
        ("megatron:expert_fc1@0.5", (ON, "--offload-modules", "expert_fc1", "--activation-offload-fraction", "0.5")),
        (
            "ours:core_attn+attn_proj/layernorm",
            (
                *(ON, "--offload-modules", "core_attn", "attn_proj", "--activation-offload-fraction", "1.0"),
                *("--recompute-granularity", "selective", "--recompute-modules", "layernorm"),
            ),
        ),
        ("te-layers:3", (OFF, "--cpu-offloading", "--cpu-offloading-num-layers", "3")),
        ("save_on_cpu", (OFF,)),
    ],
)
def test_a_setting_adds_the_flags_that_its_name_says(name, flags):
    setting = parse_setting(name)
    assert setting.list_flags() == flags
    assert setting.name == name


def test_a_plan_takes_its_modules_from_its_file_and_its_name_from_the_files():
    setting = parse_setting("plan:some@folder/a+b.json")
    assert setting.plan == Path("some@folder/a+b.json")
    assert setting.name == "plan:a+b"
    assert setting.list_flags() == (
        *(ON, "--offload-modules", "--activation-offload-fraction", "1.0"),
        *("--offload-plan", "some@folder/a+b.json"),
    )


def test_a_budget_keeps_its_name_when_it_has_a_plan():
    setting = parse_setting("budget:18.9GiB")
    assert setting.budget_bytes == 20_293_720_473
    assert setting.name == setting.with_plan(Path("x.json")).name == "budget:18.90GiB"
    assert setting.with_plan(Path("x.json")).list_flags()[-2:] == ("--offload-plan", "x.json")


def test_a_setting_that_needs_a_plan_and_has_none_never_runs_as_one_without_offload():
    with pytest.raises(ConfigError) as caught:
        parse_setting("budget:1MiB").list_flags()
    assert str(caught.value) == (
        "budget:1.00MiB needs a plan, and has none here. Give a plan file, as in plan:plan.json, or use fgoffload bench "
        "--budgets, which makes one."
    )
    with pytest.raises(ConfigError, match=r"budget:1\.00MiB needs a plan"):
        check_plans([NOTHING, parse_setting("plan:x.json"), parse_setting("budget:1MiB")])
    with pytest.raises(ConfigError, match=r"no setting\. Measure one with fgoffload bench --profile\."):
        PROFILE.list_flags()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--settings '' is no setting. Give one that begins with nothing, recompute, megatron"),
        ("megatrom:core_attn", "'megatrom:core_attn' is no setting"),
        ("x.sh", "'x.sh' is no setting"),
        ("recompute", "--settings 'recompute' lacks what runs again, as in recompute:full. Add it."),
        ("ours", "lacks modules, as in ours:core_attn"),
        ("megatron@0.5", "lacks modules"),
        ("te-layers", "lacks a number of layers"),
        ("plan", "lacks a plan file, as in plan:plan.json"),
        ("plan:", "'plan:' is no setting"),
        ("budget", "lacks a size"),
        ("te-layers:0", "'0' is no number of layers"),
        ("te-layers:two", "'two' is no number of layers"),
        ("nothing:much", "nothing can stand behind nothing"),
        ("save_on_cpu@0.5", "a part (@) and recompute (/) go with modules"),
        ("recompute:full/layernorm", "a part (@) and recompute (/) go with modules"),
        ("ours:expert_fc1@0", "'0' is no part. Give a number above 0 and up to 1"),
        ("ours:expert_fc1@1.5", "'1.5' is no part"),
        ("ours:expert_fc1@half", "'half' is no part"),
        ("ours:attn_proj", "'attn_proj' needs 'core_attn' with it"),
        ("ours:core_atn", "Did you mean 'core_attn'?"),
        ("budget:18.9PB", "--settings budget:18.9PB: '18.9PB' is not a size"),
        ("budget:18", "--settings budget:18: '18' has no unit. Add one of B, KiB, MiB, GiB, TiB, as in 18GiB."),
    ],
)
def test_a_name_that_says_nothing_is_refused_with_what_is_wrong(name, message):
    with pytest.raises(ConfigError) as caught:
        parse_setting(name)
    assert message in str(caught.value)


TAGS = [tag.name for tag in default_tags() if not tag.requires and not tag.excludes and tag.name != "fused_group_mlp"]
MODULES = st.lists(st.sampled_from(TAGS), min_size=1, unique=True)
RECOMPUTE = st.lists(st.sampled_from(["layernorm", "moe_act", "mlp"]), unique=True)


@settings(deadline=None, max_examples=50)
@given(MODULES, RECOMPUTE, st.sampled_from([1.0, 0.5, 0.25]), st.sampled_from([System.OURS, System.MEGATRON]))
def test_a_name_is_read_as_the_setting_that_it_was_written_for(modules, recompute, fraction, system):
    setting = Setting(system=system, modules=tuple(modules), recompute=tuple(recompute), fraction=fraction)
    assert parse_setting(setting.name) == setting


def test_libraries_that_read_switches_at_import_have_processes_of_their_own():
    names = ("nothing", "recompute:full", "ours:core_attn", "save_on_cpu", "plan:x.json", "budget:1GiB")
    assert {parse_setting(name).process for name in names} == {ProcessKind.MAIN}
    assert parse_setting("megatron:core_attn").process is ProcessKind.MEGATRON
    assert parse_setting("te-layers:1").process is ProcessKind.LAYERS
    assert [kind.environment["NVTE_CPU_OFFLOAD_V1"] for kind in ProcessKind] == [None, "1", None]


def list_names(transformer, **options):
    return [setting.name for setting in list_default_settings(transformer, **options)]


def test_the_default_settings_of_experts_on_transformer_engine_have_every_system_that_needs_no_file():
    names = list_names(MOE)
    assert names[:8] == [
        "nothing",
        "recompute:full",
        "recompute:layernorm",
        "recompute:moe_act",
        "recompute:moe",
        "recompute:layernorm+moe_act",
        "recompute:layernorm+moe",
        "recompute:core_attn",
    ]
    own = [name.removeprefix("ours:") for name in names if name.startswith("ours:")]
    assert own == ["layer_input/full", *(name.removeprefix("megatron:") for name in names if name.startswith("megatron:"))]
    assert {"core_attn+attn_proj+expert_fc1", "core_attn+attn_proj+expert_fc1/layernorm+moe_act"} < set(own)
    assert {"core_attn+attn_proj/layernorm+moe", "qkv_linear+core_attn+attn_proj/layernorm+moe"} < set(own)
    assert names[-2:] == ["te-layers:2", "te-layers:4"]
    assert "save_on_cpu" in names
    assert len(set(names)) == len(names)


def test_settings_that_a_model_has_no_use_for_are_left_out():
    dense = list_names({"num_layers": 4, "transformer_impl": "transformer_engine"})
    assert not [name for name in dense if "moe" in name or "expert" in name or "layernorm" in name]
    assert "recompute:mlp" not in dense  # with biases Megatron cannot
    assert "recompute:mlp" in list_names({"num_layers": 4, "add_bias_linear": False})
    local = list_names({"num_layers": 4, "num_moe_experts": 4})
    assert not [name for name in local if name.startswith(("megatron", "te-layers")) or "moe_act" in name.partition("/")[2]]
    assert "recompute:mla_up_proj" in list_names({**MOE, "multi_latent_attention": True})
    assert not [name for name in list_names({**MOE, "pipeline_model_parallel_size": 2}) if name.startswith("te-layers")]
    assert [name for name in list_names({**MOE, "num_layers": 1}) if name.startswith("te-layers")] == []


def test_plans_and_budgets_are_settings():
    names = list_names(MOE, plans=[Path("a/x.json"), Path("y.json")], budgets_bytes=[2**30])
    assert {"plan:x", "plan:y", "budget:1.00GiB"} < set(names)


def test_the_name_of_a_system_takes_its_default_settings_and_nothing_is_always_first():
    defaults = list_default_settings(MOE)
    chosen = choose_settings(["te-layers", "recompute:full", "recompute:full", "ours:router"], defaults)
    assert [setting.name for setting in chosen] == ["nothing", "te-layers:2", "te-layers:4", "recompute:full", "ours:router"]
    assert choose_settings([], defaults) == (NOTHING,)


def test_a_system_without_default_settings_has_to_be_given_in_full():
    with pytest.raises(ConfigError, match="'megatron' lacks modules"):
        choose_settings(["megatron"], list_default_settings({"num_layers": 2}))


def test_two_plan_files_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"two settings are called plan:x\. Give their plan files different names"):
        check_names([parse_setting("plan:a/x.json"), parse_setting("plan:b/x.json")])
