"""Tests model shapes: experts of MTP layers, and errors of invalid shapes."""

import dataclasses

import pytest
from support.public_models import DEEPSEEK_V3, LLAMA_8B

from fgoffload.errors import ConfigError
from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.model.rank_layer import make_layer_shape

DEEPSEEK = dataclasses.replace(DEEPSEEK_V3, num_layers=5, moe_layers=(False,) * 3 + (True,) * 2, mtp_num_layers=1)


def test_mtp_layers_have_experts_if_the_last_decoder_layer_has():
    assert DEEPSEEK.has_experts(5)
    dense_last = dataclasses.replace(DEEPSEEK, moe_layers=(True, True, True, True, False))
    assert not dense_last.has_experts(5)
    assert make_layer_shape(dense_last, Parallelism(), 5).ffn_hidden_size == 18432


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers 0 is below 1"),
        ({"vocab_size": "128256"}, "vocab_size '128256' is not a whole number"),
        ({"num_query_groups": 5}, "num_query_groups 5 does not divide num_attention_heads 32"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size is 0, but layer 0 has no experts"),
        ({"fp8_recipe": "hybrid"}, "fp8_recipe 'hybrid' is not supported"),
        ({"window_layers": (True,) * 32}, "window_layers without window_tokens has no effect"),
        ({"experts": DEEPSEEK.experts, "moe_layers": (True,)}, "moe_layers has 1 entries for num_layers 32"),
        (
            {"experts": ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=64, expert_parallel_size=2)},
            r"experts.expert_parallel_size 2 is not a property of the model",
        ),
    ],
)
def test_an_invalid_model_shape_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LLAMA_8B, **changes)
