import dataclasses
import doctest

import pytest

from fgoffload.errors import ConfigError
from fgoffload.planner.model import model_shape
from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.model_shape import (
    LatentAttention,
    ModelShape,
    list_moe_layers,
    list_window_layers,
    make_layer_shape,
    pad_vocab_size,
)
from fgoffload.planner.model.parallelism import Parallelism

LLAMA = ModelShape(
    name="llama",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=128256,
    seq_length=8192,
)
DEEPSEEK = ModelShape(
    name="deepseek",
    num_layers=5,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    num_query_groups=128,
    vocab_size=129280,
    seq_length=4096,
    has_qk_norm=True,
    latent=LatentAttention(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128),
    experts=ExpertsShape(num_experts=256, topk=8, ffn_hidden_size=2048, shared_ffn_hidden_size=2048),
    moe_layers=(False, False, False, True, True),
    mtp_num_layers=1,
)


def test_the_example_of_the_module_runs():
    assert doctest.testmod(model_shape).failed == 0


def test_layers_of_multi_token_prediction_are_numbered_behind_the_decoders():
    kinds = [DEEPSEEK.get_kind(number) for number in DEEPSEEK.numbers]
    assert kinds == ["dense", "dense", "dense", "moe", "moe", "mtp"]


def test_a_model_without_experts_is_dense_throughout():
    assert {LLAMA.get_kind(number) for number in LLAMA.numbers} == {"dense"}


def test_a_layer_of_multi_token_prediction_has_what_the_decoders_last_has():
    assert DEEPSEEK.has_experts(5)
    dense_last = dataclasses.replace(DEEPSEEK, moe_layers=(True, True, True, True, False))
    assert not dense_last.has_experts(5)
    assert make_layer_shape(dense_last, Parallelism(), 5).ffn_hidden_size == 18432


@pytest.mark.parametrize("number", [-1, 6, 7, "1"])
def test_a_layer_that_is_not_there_is_refused(number):
    with pytest.raises(ConfigError, match=r"layer .* is not one of the 6 of deepseek. Give 0 to 5."):
        DEEPSEEK.get_kind(number)


def test_channels_of_heads_are_those_of_the_attention_that_the_model_has():
    assert (LLAMA.qk_channels, LLAMA.v_channels, LLAMA.rotary_channels) == (128, 128, 128)
    assert (DEEPSEEK.qk_channels, DEEPSEEK.v_channels, DEEPSEEK.rotary_channels) == (192, 128, 0)
    assert dataclasses.replace(LLAMA, rotary_percent=0.5).rotary_channels == 64


def test_a_window_is_in_the_layers_that_have_one_and_never_in_multi_token_prediction():
    alternating = dataclasses.replace(DEEPSEEK, window_tokens=128, window_layers=(True, False, True, False, True))
    assert [alternating.has_window(number) for number in range(6)] == [True, False, True, False, True, False]
    assert not DEEPSEEK.has_window(0)
    assert dataclasses.replace(LLAMA, window_tokens=128).has_window(31)


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
    ("pattern", "expected"),
    [
        (1, (False,) * 4),
        (2, (True, False, True, False)),
        (4, (True, True, True, False)),
        ([0, 1, 1, 0], (False, True, True, False)),
    ],
)
def test_a_frequency_or_a_list_says_which_layers_have_the_window(pattern, expected):
    assert list_window_layers(pattern, num_layers=4) == expected
    theirs = pytest.importorskip("megatron.core.transformer.utils").is_layer_window_attention
    assert tuple(theirs((128, 0), pattern, number) for number in range(1, 5)) == expected


def test_a_pattern_of_windows_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="window_attn_skip_freq has 2 entries, of which 2 are 0 or 1, for num_layers 4"):
        list_window_layers([0, 1], num_layers=4)
    with pytest.raises(ConfigError, match="window_attn_skip_freq 0 is below 1"):
        list_window_layers(0, num_layers=4)


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


def test_a_layer_with_queries_in_groups_has_the_rotary_embedding_of_the_model():
    layer = make_layer_shape(LLAMA, Parallelism(), 0)
    assert (layer.qk_channels, layer.num_query_groups, layer.rotary_channels, layer.latent) == (128, 8, 128, None)


@pytest.mark.parametrize(
    ("model", "parallelism", "message"),
    [
        (
            dataclasses.replace(LLAMA, activation_dtype_bytes=4),
            Parallelism(),
            "activation_dtype_bytes 4, as of a training in fp32",
        ),
        (LLAMA, Parallelism(tensor_parallel_size=16), "size 16 is more than the 8 num_query_groups of llama"),
    ],
)
def test_a_layer_whose_bytes_nobody_knows_is_refused(model, parallelism, message):
    with pytest.raises(ConfigError, match=message):
        make_layer_shape(model, parallelism, 4)


def test_what_the_model_says_of_all_layers_reaches_each_of_them():
    fields = {"has_qk_norm": True, "is_gated": False, "has_hidden_dropout": True, "fp8_recipe": "blockwise"}
    layer = make_layer_shape(dataclasses.replace(LLAMA, **fields), Parallelism(), 1)
    assert {name: getattr(layer, name) for name in fields} == fields
    plain = make_layer_shape(LLAMA, Parallelism(), 1)
    expected = {"has_qk_norm": False, "is_gated": True, "has_hidden_dropout": False, "fp8_recipe": None}
    assert {name: getattr(plain, name) for name in fields} == expected


def test_activations_are_fused_unless_they_are_gated_and_the_model_says_otherwise():
    unfused = dataclasses.replace(LLAMA, has_fused_activation=False)
    assert make_layer_shape(LLAMA, Parallelism(), 0).has_fused_activation
    assert not make_layer_shape(unfused, Parallelism(), 0).has_fused_activation
    # Without a gate both ways are alike, and layers are of one kind.
    assert make_layer_shape(dataclasses.replace(unfused, is_gated=False), Parallelism(), 0).has_fused_activation


def test_norms_of_compressed_queries_are_not_those_of_heads():
    layer = make_layer_shape(DEEPSEEK, Parallelism(), 0)
    assert (layer.has_qk_norm, layer.latent.has_qk_norm) == (False, True)


def test_a_layer_of_multi_token_prediction_has_a_projection():
    shapes = [make_layer_shape(DEEPSEEK, Parallelism(), number) for number in DEEPSEEK.numbers]
    assert [shape.has_mtp_projection for shape in shapes] == [False] * 5 + [True]


def test_rotary_embeddings_are_fused_where_there_are_any_and_it_is_known_what_they_save():
    assert make_layer_shape(LLAMA, Parallelism(), 0).has_fused_rotary
    assert not make_layer_shape(dataclasses.replace(LLAMA, has_fused_rotary=False), Parallelism(), 0).has_fused_rotary
    assert not make_layer_shape(dataclasses.replace(LLAMA, rotary_percent=0.0), Parallelism(), 0).has_fused_rotary
    assert not make_layer_shape(DEEPSEEK, Parallelism(), 0).has_fused_rotary


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers 0 is below 1"),
        ({"vocab_size": "128256"}, "vocab_size '128256' is no whole number"),
        ({"kv_channels": -128}, "kv_channels -128 is below 1"),
        ({"num_query_groups": 5}, "num_query_groups 5 does not divide num_attention_heads 32"),
        ({"kv_channels": 0}, "kv_channels 0 without latent attention"),
        ({"latent": DEEPSEEK.latent}, "num_query_groups 8 differs from num_attention_heads 32"),
        ({"latent": DEEPSEEK.latent, "num_query_groups": 32}, "kv_channels 128 with latent attention"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size is 0 and layer 0 has no experts"),
        ({"normalization": "rms"}, "normalization 'rms' is not known"),
        ({"fp8_recipe": "hybrid"}, "fp8_recipe 'hybrid' is not known"),
        ({"activation_dtype_bytes": 1}, "activation_dtype_bytes 1 is not known"),
        ({"rotary_percent": 1.5}, "rotary_percent 1.5 is no part of a head"),
        ({"moe_layers": (True,) * 32}, "moe_layers without experts has no effect"),
        ({"window_layers": (True,) * 32}, "window_layers without window_tokens has no effect"),
        ({"window_tokens": 0}, "window_tokens 0 is below 1"),
        ({"window_tokens": 128, "window_layers": (True,)}, "window_layers has 1 entries for num_layers 32"),
        ({"experts": DEEPSEEK.experts, "moe_layers": (True,)}, "moe_layers has 1 entries for num_layers 32"),
        (
            {"experts": ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=64, expert_parallel_size=2)},
            r"experts.expert_parallel_size 2 belongs to the ranks",
        ),
        (
            {"experts": ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=64, expert_tensor_parallel_size=2)},
            r"experts.expert_tensor_parallel_size 2 belongs to the ranks",
        ),
    ],
)
def test_a_shape_that_no_model_has_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LLAMA, **changes)


@pytest.mark.parametrize("name", ["q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"])
def test_latent_attention_has_no_size_below_1(name):
    with pytest.raises(ConfigError, match=f"{name} 0 is below 1"):
        dataclasses.replace(DEEPSEEK.latent, **{name: 0})
