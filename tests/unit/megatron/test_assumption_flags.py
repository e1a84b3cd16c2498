"""Tests how Megatron's flags set the assumptions of a prediction: gradients, optimizer, kernels and offloaded bytes."""

import dataclasses

import pytest

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.model_shapes import read_assumptions
from fgoffload.planner.memory.static_memory import ADAM
from fgoffload.planner.model_ranks import Assumptions
from fgoffload.planner.operations.ops import Execution

AWARE = "--bf16 --use-precision-aware-optimizer"


def read(flags="--bf16", *, typed="", **options):
    return read_assumptions(flags.split(), source="file.sh", typed=typed.split(), **options)


def read_state(flags, **options):
    state = read(flags, **options).state
    return state.gradient_bytes, state.main_parameter_bytes, state.moment_bytes


def test_assumptions_default_to_megatrons_defaults():
    assert read() == Assumptions()
    assert read().state == ADAM


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--fp8-param-gather", {"has_fp8_weights": True}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"shards_gradients": True}),
        ("--use-torch-fsdp2", {"shards_gradients": True, "shards_weights": True}),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", {"offloaded_part": 0.5}),
    ],
)
def test_flags_set_sharding_fp8_weights_and_optimizer_offload(flags, expected):
    assert read(f"--bf16 {flags}").state == dataclasses.replace(ADAM, **expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--bf16", (4, 4, 8)),
        ("--bf16 --grad-reduce-in-bf16", (2, 4, 8)),
        ("--fp16", (2, 4, 8)),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", (4, 4, 8)),
        ("", (4, 0, 8)),  # in fp32 the optimizer updates the weights themselves
        (AWARE, (4, 2, 8)),
        (f"{AWARE} --main-grads-dtype bf16", (2, 2, 8)),
        (f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", (4, 2, 4)),
        # DeepSeek-V3: gradients in fp32, moments in bf16, and blockwise fp8 weights with main parameters in fp32.
        (f"{AWARE} --fp8-recipe blockwise --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", (4, 4, 4)),
    ],
)
def test_flags_set_gradient_and_optimizer_bytes_per_parameter(flags, expected):
    assert read_state(flags) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--main-grads-dtype bf16", "--main-grads-dtype bf16 needs --use-precision-aware-optimizer. Add it, or pass"),
        ("--main-params-dtype fp16", "--main-params-dtype fp16 needs --use-precision-aware-optimizer"),
        ("--main-params-dtype bf16", "--main-params-dtype 'bf16' is not supported. Use one of: fp32, fp16"),
        (f"{AWARE} --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32", "are mutually exclusive. Use one of them"),
        ("--min-offloaded-tensor-size -1", "--min-offloaded-tensor-size -1 is below 0"),
        ("--offload-window 1PB", "--offload-window '1PB' is not a size"),
        ("--offload-prefetch 5", "--offload-prefetch '5' has no unit"),
    ],
)
def test_flags_that_megatron_rejects_are_rejected(flags, message):
    with pytest.raises(ConfigError, match=f"^file.sh: .*{message}"):
        read(flags)
    with pytest.raises(ConfigError, match=message):
        read(typed=flags)


def test_other_optimizers_are_counted_as_adam_with_a_warning(caplog):
    assert read_state("--bf16 --optimizer adam") == read_state("--bf16 --optimizer muon") == (4, 4, 8)
    assert [record.message for record in caplog.records] == [
        "--optimizer muon: the sizes of its states are unknown, so a plan assumes those of Adam."
    ]


def test_disabled_kernel_fusions_reach_the_execution_assumptions():
    found = read("--bf16 --no-bias-dropout-fusion", typed="--no-gradient-accumulation-fusion").execution
    assert found == Execution(has_fused_dropout_add=False, has_fused_gradient_accumulation=False)
