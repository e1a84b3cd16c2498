"""Tests Megatron's training flags with the model of a Hugging Face configuration."""

import dataclasses

import pytest

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.model_shapes import read_parallelism
from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.model_shape import ModelShape


def make_model(**fields):
    model = ModelShape(
        name="tiny",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        vocab_size=1000,
        seq_length=128,
        experts=ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=96),
    )
    return dataclasses.replace(model, **fields)


def read_flags(flags, **fields):
    return read_parallelism(flags.split(), source="config.json", model=make_model(**fields))


@pytest.mark.parametrize(
    ("flags", "fields", "message"),
    [
        ("--hidden-size 128", {}, "--hidden-size is set by the configuration of tiny. Remove it."),
        ("--moe-permute-fusion", {"experts": None}, "--moe-permute-fusion is for experts, but tiny has none"),
        ("--no-bias-swiglu-fusion", {"has_quick_gate": True}, "--no-bias-swiglu-fusion with tiny, which uses quick GEGLU"),
        ("--ep 3", {}, "config.json: --expert-model-parallel-size 3 does not divide num_experts 8"),
        ("--pipeline-size 2", {}, "config.json: --pipeline-size is an unknown flag"),
        ("--tp 2 --etp 1 --no-sequence-parallel", {}, "--tensor-model-parallel-size 2 without --sequence-parallel"),
    ],
)
def test_flags_that_contradict_a_hugging_face_config_are_rejected(flags, fields, message):
    with pytest.raises(ConfigError, match=message):
        read_flags(flags, **fields)


@pytest.mark.parametrize(
    ("flags", "fields", "warnings"),
    [
        ("--tp 2 --etp 1", {}, ["config.json: --sequence-parallel is assumed, because Megatron needs it for experts."]),
        (
            "--tp 2",
            {"experts": None, "ffn_hidden_size": 512},
            ["config.json: --sequence-parallel is assumed; --no-sequence-parallel disables it."],
        ),
        ("--tp 2 --etp 1 --sequence-parallel", {}, []),
    ],
)
def test_sequence_parallel_is_assumed_for_a_hugging_face_config(flags, fields, warnings, caplog):
    _, ranks = read_flags(f"{flags} --global-batch-size 4", **fields)
    assert ranks.has_sequence_parallel
    assert [record.message for record in caplog.records] == warnings
