import dataclasses
import doctest

import pytest
from support.public_models import DEEPSEEK_V3, LLAMA_8B

from fgoffload.errors import ConfigError
from fgoffload.planner.model import model_shape
from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.model_shape import (
    list_moe_layers,
    make_layer_shape,
    pad_vocab_size,
)
from fgoffload.planner.model.parallelism import Parallelism

DEEPSEEK = dataclasses.replace(DEEPSEEK_V3, num_layers=5, moe_layers=(False,) * 3 + (True,) * 2, mtp_num_layers=1)


def test_the_example_of_the_module_runs():
    assert doctest.testmod(model_shape).failed == 0


def test_a_layer_of_multi_token_prediction_has_what_the_decoders_last_has():
    assert DEEPSEEK.has_experts(5)
    dense_last = dataclasses.replace(DEEPSEEK, moe_layers=(True, True, True, True, False))
    assert not dense_last.has_experts(5)
    assert make_layer_shape(dense_last, Parallelism(), 5).ffn_hidden_size == 18432


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (1, (True, True, True, True)),
        (2, (True, False, True, False)),
        (3, (True, False, False, True)),
        ([0, 1, 1, 0], (False, True, True, False)),
    ],
)
def test_a_frequency_or_a_list_says_which_layers_have_experts(pattern, expected):
    assert list_moe_layers(pattern, num_layers=4) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [(0, "moe_layer_freq 0 is below 1"), ([0, 1], "has 2 entries, of which 2 are 0 or 1"), ([0, 1, 2, 1], "of which 3 are")],
)
def test_a_pattern_of_another_model_is_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        list_moe_layers(pattern, num_layers=4)


@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "tensor_parallel_size", "expected"),
    [(129280, 128, 1, 129280), (151936, 128, 8, 152576), (201088, 128, 1, 201088), (32000, 128, 4, 32256), (256, 128, 1, 256)],
)
def test_a_vocabulary_is_padded_to_what_ranks_can_share(vocab_size, divisible_by, tensor_parallel_size, expected):
    padded = pad_vocab_size(vocab_size, divisible_by=divisible_by, tensor_parallel_size=tensor_parallel_size)
    assert padded == expected


def test_a_layer_is_given_as_a_rank_runs_it():
    parallelism = Parallelism(
        tensor_parallel_size=2,
        context_parallel_size=2,
        expert_parallel_size=4,
        expert_tensor_parallel_size=2,
        data_parallel_size=2,
        micro_batch_size=3,
    )
    layer = make_layer_shape(DEEPSEEK, parallelism, 3)
    assert (layer.micro_batch_size, layer.seq_length, layer.tensor_parallel_size) == (3, 2048, 2)
    assert (layer.qk_channels, layer.v_channels, layer.num_query_groups) == (192, 128, 128)
    assert (layer.experts.num_experts, layer.ffn_hidden_size) == (256, 0)
    assert (layer.experts.expert_parallel_size, layer.experts.expert_tensor_parallel_size) == (4, 2)
    assert (layer.latent.q_lora_rank, layer.latent.kv_lora_rank, layer.latent.qk_pos_emb_head_dim) == (1536, 512, 64)
    assert layer.latent.has_qk_norm
    dense = make_layer_shape(DEEPSEEK, parallelism, 0)
    assert (dense.experts, dense.ffn_hidden_size) == (None, 18432)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers 0 is below 1"),
        ({"vocab_size": "128256"}, "vocab_size '128256' is no whole number"),
        ({"num_query_groups": 5}, "num_query_groups 5 does not divide num_attention_heads 32"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size is 0 and layer 0 has no experts"),
        ({"fp8_recipe": "hybrid"}, "fp8_recipe 'hybrid' is not known"),
        ({"window_layers": (True,) * 32}, "window_layers without window_tokens has no effect"),
        ({"experts": DEEPSEEK.experts, "moe_layers": (True,)}, "moe_layers has 1 entries for num_layers 32"),
        (
            {"experts": ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=64, expert_parallel_size=2)},
            r"experts.expert_parallel_size 2 belongs to the ranks",
        ),
    ],
)
def test_a_shape_that_no_model_has_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LLAMA_8B, **changes)
