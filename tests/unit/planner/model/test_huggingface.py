"""Models from `config.json`. The figures are those of the makers' own files, as public on Hugging Face."""

import json

import pytest

from fgoffload.errors import ConfigError
from fgoffload.planner.model.huggingface import read_huggingface_config
from fgoffload.planner.model.layer_shape import DEFAULT_IMBALANCE, ExpertsShape, RouterShape
from fgoffload.planner.model.model_shape import LatentAttention
from fgoffload.planner.model.parameters import count_parameters

LLAMA3_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_235B_A22B = {
    **QWEN3_30B_A3B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {"quant_method": "mxfp4"},
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PUBLISHED = {
    # In billions. Those of DeepSeek-V3 and Kimi K2 as their files have them: 671 and 11.6 of a layer that predicts, and 1026.
    "llama3_8b": (LLAMA3_8B, 8.03),
    "qwen2_7b": (QWEN2_7B, 7.616),
    "qwen3_8b": (QWEN3_8B, 8.19),
    "qwen3_30b_a3b": (QWEN3_30B_A3B, 30.53),
    "qwen3_235b_a22b": (QWEN3_235B_A22B, 235.1),
    "mixtral_8x7b": (MIXTRAL_8X7B, 46.7),
    "deepseek_v2_lite": (DEEPSEEK_V2_LITE, 15.71),
    "deepseek_v3": (DEEPSEEK_V3, 682.6),
    "kimi_k2": (KIMI_K2, 1026.4),
    "gpt_oss_120b": (GPT_OSS_120B, 116.83),
}


def read(tmp_path, document, **options):
    path = tmp_path / "config.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return read_huggingface_config(path, **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_its_maker_says(tmp_path, name):
    document, billions = PUBLISHED[name]
    assert count_parameters(read(tmp_path, document)) / 1e9 == pytest.approx(billions, rel=5e-4)


def test_a_dense_model_is_read(tmp_path):
    model = read(tmp_path, LLAMA3_8B)
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.vocab_size) == (32, 4096, 14336, 128256)
    assert (model.num_attention_heads, model.num_query_groups, model.kv_channels) == (32, 8, 128)
    assert (model.experts, model.latent, model.has_qkv_bias, model.has_qk_norm) == (None, None, False, False)
    assert (model.is_gated, model.normalization, model.activation_dtype_bytes) == (True, "RMSNorm", 2)
    assert not model.has_tied_embeddings
    assert not model.has_hidden_dropout


def test_the_name_is_that_of_the_folder_or_of_the_file(tmp_path):
    folder = tmp_path / "Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA3_8B), encoding="utf-8")
    (folder / "mine.json").write_text(json.dumps(LLAMA3_8B), encoding="utf-8")
    assert read_huggingface_config(folder / "config.json").name == "Llama-3-8B"
    assert read_huggingface_config(folder).name == "Llama-3-8B"
    assert read_huggingface_config(folder / "mine.json").name == "mine"


def test_sequences_are_as_long_as_the_caller_says(tmp_path):
    assert read(tmp_path, LLAMA3_8B).seq_length == 4096
    assert read(tmp_path, LLAMA3_8B, seq_length=8192).seq_length == 8192


def test_qwen2_has_biases_and_qwen3_has_norms_of_heads(tmp_path):
    model = read(tmp_path, QWEN2_7B)
    assert (model.has_qkv_bias, model.has_linear_bias, model.has_qk_norm, model.kv_channels) == (True, False, False, 128)
    model = read(tmp_path, QWEN3_8B)
    assert (model.has_qkv_bias, model.has_qk_norm, model.window_tokens) == (False, True, None)


def test_biases_are_those_that_the_file_has(tmp_path):
    attention = read(tmp_path, {**LLAMA3_8B, "attention_bias": True})
    assert (attention.has_qkv_bias, attention.has_linear_bias) == (True, False)
    both = read(tmp_path, {**LLAMA3_8B, "attention_bias": True, "mlp_bias": True})
    assert both.has_linear_bias
    assert read(tmp_path, {**QWEN3_8B, "attention_bias": True}).has_qkv_bias


def test_the_window_of_qwen_is_in_its_upper_layers(tmp_path):
    document = {**QWEN2_7B, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 26}
    model = read(tmp_path, document)
    assert (model.window_tokens, model.window_layers) == (4095, (False,) * 26 + (True,) * 2)


def test_a_mixture_is_read(tmp_path):
    model = read(tmp_path, QWEN3_30B_A3B)
    assert model.experts == ExpertsShape(num_experts=128, topk=8, ffn_hidden_size=768, imbalance=DEFAULT_IMBALANCE)
    assert (model.moe_layers, model.kv_channels, model.has_qk_norm) == ((True,) * 48, 128, True)
    assert read(tmp_path, {**QWEN3_30B_A3B, "norm_topk_prob": False}).experts.router.has_pre_softmax


def test_layers_without_experts_are_those_that_the_file_names(tmp_path):
    document = {**QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    # Every second layer has experts, from the second on, and the fourth is named.
    assert read(tmp_path, document).moe_layers == (False, True, False, False, False, True)


def test_mixtral_names_the_width_of_an_expert_as_that_of_an_mlp(tmp_path):
    model = read(tmp_path, MIXTRAL_8X7B)
    assert model.experts == ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=14336, imbalance=DEFAULT_IMBALANCE)
    assert {model.get_kind(number) for number in model.numbers} == {"moe"}
    assert (model.window_tokens, model.has_window(0)) == (None, False)
    with_window = read(tmp_path, {**MIXTRAL_8X7B, "sliding_window": 4096})
    assert (with_window.window_tokens, with_window.has_window(31)) == (4095, True)


def test_latent_attention_is_read(tmp_path):
    model = read(tmp_path, DEEPSEEK_V3)
    expected = LatentAttention(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    assert (model.latent, model.has_qk_norm, model.kv_channels) == (expected, True, 0)
    assert read(tmp_path, DEEPSEEK_V2_LITE).latent.q_lora_rank is None


def test_the_experts_of_deepseek_are_read(tmp_path):
    model = read(tmp_path, DEEPSEEK_V3)
    assert model.experts == ExpertsShape(
        num_experts=256,
        topk=8,
        ffn_hidden_size=2048,
        shared_ffn_hidden_size=2048,
        imbalance=DEFAULT_IMBALANCE,
        router=RouterShape(score_function="sigmoid", has_expert_bias=True),
    )
    assert model.moe_layers == (False,) * 3 + (True,) * 58
    assert (model.mtp_num_layers, model.get_kind(61)) == (1, "mtp")
    lite = read(tmp_path, DEEPSEEK_V2_LITE)
    assert (lite.experts.shared_ffn_hidden_size, lite.experts.router) == (2816, RouterShape(has_pre_softmax=True))
    assert (lite.moe_layers.count(False), lite.mtp_num_layers) == (1, 0)


def test_kimi_is_read_like_deepseek(tmp_path):
    model = read(tmp_path, KIMI_K2)
    assert (model.experts.num_experts, model.moe_layers.count(False), model.mtp_num_layers) == (384, 1, 0)


def test_experts_in_every_second_layer_are_counted_from_the_first(tmp_path):
    document = {**DEEPSEEK_V2_LITE, "num_hidden_layers": 6, "moe_layer_freq": 2}
    assert read(tmp_path, document).moe_layers == (False, False, True, False, True, False)


def test_gpt_oss_has_windows_sinks_biases_and_a_quick_gate(tmp_path):
    model = read(tmp_path, GPT_OSS_120B)
    assert model.has_quick_gate
    assert not read(tmp_path, QWEN3_30B_A3B).has_quick_gate
    assert (model.window_tokens, model.window_layers) == (127, (True, False) * 18)
    assert (model.has_attention_sinks, model.has_linear_bias, model.kv_channels) == (True, True, 64)
    assert model.experts == ExpertsShape(num_experts=128, topk=4, ffn_hidden_size=2880, imbalance=DEFAULT_IMBALANCE)
    without = {name: value for name, value in GPT_OSS_120B.items() if name != "layer_types"}
    assert read(tmp_path, without).window_layers == (True, False) * 18


def leave_out(document, *names):
    return {name: value for name, value in document.items() if name not in names}


@pytest.mark.parametrize(
    ("document", "names", "expected"),
    [
        (LLAMA3_8B, ("num_key_value_heads",), {"num_query_groups": 32}),
        (QWEN2_7B, ("use_sliding_window", "sliding_window", "max_window_layers"), {"window_tokens": None}),
        ({**QWEN3_8B, "hidden_size": 5120}, ("head_dim", "num_key_value_heads"), {"kv_channels": 128, "num_query_groups": 32}),
        (QWEN3_30B_A3B, ("head_dim", "num_key_value_heads"), {"kv_channels": 64, "num_query_groups": 4}),
        (QWEN3_30B_A3B, ("decoder_sparse_step", "mlp_only_layers"), {"moe_layers": (True,) * 48}),
        (MIXTRAL_8X7B, ("num_key_value_heads", "sliding_window"), {"num_query_groups": 8, "window_tokens": None}),
        (DEEPSEEK_V3, ("first_k_dense_replace", "moe_layer_freq"), {"moe_layers": (False,) * 3 + (True,) * 58}),
        (DEEPSEEK_V3, ("num_nextn_predict_layers",), {"mtp_num_layers": 0}),
        (DEEPSEEK_V2_LITE, ("first_k_dense_replace",), {"moe_layers": (True,) * 27}),
        (GPT_OSS_120B, ("head_dim", "sliding_window", "num_key_value_heads"), {"kv_channels": 64, "window_tokens": 127}),
        (GPT_OSS_120B, ("num_key_value_heads", "tie_word_embeddings"), {"num_query_groups": 8, "has_tied_embeddings": False}),
    ],
)
def test_a_field_that_is_left_out_is_what_transformers_takes(tmp_path, document, names, expected):
    model = read(tmp_path, leave_out(document, *names))
    assert {name: getattr(model, name) for name in expected} == expected


def test_what_deepseek_leaves_out_is_what_transformers_takes(tmp_path):
    names = ("q_lora_rank", "n_shared_experts", "norm_topk_prob")
    v2, v3 = (read(tmp_path, leave_out(document, *names)) for document in (DEEPSEEK_V2_LITE, DEEPSEEK_V3))
    assert (v2.latent.q_lora_rank, v2.experts.shared_ffn_hidden_size) == (1536, 2 * 1408)
    assert (v3.latent.q_lora_rank, v3.experts.shared_ffn_hidden_size) == (1536, 2048)


def test_heads_of_latent_attention_need_not_divide_the_hidden_size(tmp_path):
    document = {**DEEPSEEK_V3, "num_attention_heads": 96, "num_key_value_heads": 96}
    assert read(tmp_path, document).num_attention_heads == 96


def test_each_layer_of_multi_token_prediction_counts(tmp_path):
    none, one, fifty = (read(tmp_path, {**DEEPSEEK_V3, "num_nextn_predict_layers": count}) for count in (0, 1, 50))
    assert (fifty.mtp_num_layers, fifty.get_kind(110)) == (50, "mtp")
    one_layer = count_parameters(one) - count_parameters(none)
    assert count_parameters(fifty) - count_parameters(none) == 50 * one_layer


def test_an_activation_may_be_left_out_or_have_its_other_name(tmp_path):
    assert read(tmp_path, leave_out(LLAMA3_8B, "hidden_act")) == read(tmp_path, {**LLAMA3_8B, "hidden_act": "swish"})


def test_a_byte_order_mark_does_not_matter(tmp_path):
    assert read(tmp_path, "\ufeff" + json.dumps(LLAMA3_8B)) == read(tmp_path, LLAMA3_8B)


def test_null_is_not_the_same_as_left_out(tmp_path):
    assert read(tmp_path, {**MIXTRAL_8X7B, "num_key_value_heads": None}).num_query_groups == 32
    assert read(tmp_path, {**GPT_OSS_120B, "hidden_size": 3072, "head_dim": None}).kv_channels == 48
    assert read(tmp_path, {**GPT_OSS_120B, "sliding_window": None}).window_tokens is None
    assert read(tmp_path, {**DEEPSEEK_V3, "q_lora_rank": None}).latent.q_lora_rank is None


def test_windows_are_those_of_the_layer_types_where_a_file_has_them(tmp_path):
    kinds = ["full_attention", "sliding_attention"] * 14
    document = {**QWEN2_7B, "use_sliding_window": True, "sliding_window": 4096, "layer_types": kinds}
    assert read(tmp_path, document).window_layers == (False, True) * 14
    assert read(tmp_path, {**document, "use_sliding_window": False}).window_tokens is None
    with_moe = {**QWEN3_30B_A3B, "use_sliding_window": True, "sliding_window": 4096}
    assert read(tmp_path, with_moe).window_layers == (True,) * 48
    assert read(tmp_path, {**LLAMA3_8B, "layer_types": ["full_attention"] * 32}) == read(tmp_path, LLAMA3_8B)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**LLAMA3_8B, "model_type": "bloom"}, "model_type 'bloom' is not known here. Give one of: llama, qwen2, qwen3,"),
        ({**LLAMA3_8B, "model_type": "qwen3_mo"}, "Did you mean 'qwen3_moe'?"),
        ({"hidden_size": 64}, "model_type is missing. Give one of: llama"),
        ({**LLAMA3_8B, "model_type": ["llama"]}, r"model_type is \['llama'\]. Give one of"),
        ({**LLAMA3_8B, "num_hidden_layers": None}, "num_hidden_layers is missing. Add it"),
        ({**LLAMA3_8B, "hidden_size": "4096"}, "hidden_size '4096' is no whole number"),
        ({**LLAMA3_8B, "vocab_size": True}, "vocab_size True is no whole number"),
        ({**QWEN3_30B_A3B, "num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is above 1000, .* Give 1000 or less"),
        ({**LLAMA3_8B, "vocab_size": -1}, "vocab_size -1 is below 1. Give 1 or more"),
        ({**LLAMA3_8B, "num_key_value_heads": 0}, "num_key_value_heads 0 is below 1. Give 1 or more"),
        ({**LLAMA3_8B, "head_dim": 0}, "head_dim 0 is below 1"),
        (
            {**LLAMA3_8B, "hidden_size": 4097},
            "hidden_size 4097 is not a multiple of num_attention_heads 32, and head_dim is mis",
        ),
        (
            {**LLAMA3_8B, "layer_types": ["chunked_attention"] * 32},
            "layer_types has 'chunked_attention', which is not known here",
        ),
        ({**LLAMA3_8B, "layer_types": ["sliding_attention"] * 32}, "a window of llama is not known here"),
        ({**MIXTRAL_8X7B, "sliding_window": 0}, "sliding_window 0 is below 2. Give 2 or more"),
        ({**MIXTRAL_8X7B, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is above num_local_experts 8. Give 8 or less"),
        ({**DEEPSEEK_V3, "num_experts_per_tok": 257}, "num_experts_per_tok 257 is above n_routed_experts 256"),
        ({**DEEPSEEK_V2_LITE, "moe_layer_freq": 0}, "moe_layer_freq 0 is below 1"),
        ({**DEEPSEEK_V3, "q_lora_rank": 0}, "q_lora_rank 0 is below 1"),
        ({**DEEPSEEK_V3, "n_shared_experts": -1}, "n_shared_experts -1 is below 0. Give 0 or more"),
        (
            {**DEEPSEEK_V3, "first_k_dense_replace": 62},
            "first_k_dense_replace 62 is above num_hidden_layers 61. Give 61 or less",
        ),
        ({**QWEN3_30B_A3B, "decoder_sparse_step": 0}, "decoder_sparse_step 0 is below 1"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": [99, -1]}, "mlp_only_layers has 99, and layers are from 0 to 47. Give some"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": [-1]}, "mlp_only_layers has -1, and layers"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": False}, "mlp_only_layers False is no list of layers"),
        ({**GPT_OSS_120B, "layer_types": ["chunked"]}, "layer_types has 'chunked', which is not known here. Give one of: slid"),
        ({**GPT_OSS_120B, "layer_types": []}, r"layer_types \[\] is no list"),
        ({**LLAMA3_8B, "num_attention_heads": 0}, "num_attention_heads 0 is below 1"),
        ({**LLAMA3_8B, "num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ({**LLAMA3_8B, "tie_word_embeddings": 0}, "tie_word_embeddings 0 is neither true nor false"),
        (
            {**LLAMA3_8B, "hidden_act": "gelu"},
            "hidden_act 'gelu' is not known here: .* gated silu. Give silu, or plan from an arg",
        ),
        ({**DEEPSEEK_V3, "hidden_act": None}, "hidden_act None is not known here"),
        ({**LLAMA3_8B, "head_dim": 7}, "head_dim 7 of .* is not a multiple of 8, .* Measure it: give an argument"),
        ({**DEEPSEEK_V3, "v_head_dim": 100}, "v_head_dim 100 of .* is not a multiple of 8, .* Measure it: give an argument"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": 62}, r"qk_head_dim \+ qk_pos_emb_head_dim 190 of .* Measure it: give"),
        ({**DEEPSEEK_V3, "num_nextn_predict_layers": 1001}, "num_nextn_predict_layers 1001 is above 1000"),
        ({**DEEPSEEK_V3, "num_key_value_heads": 8}, "num_key_value_heads 8 differs from num_attention_heads 128, .* Give 128"),
        ({**LLAMA3_8B, "mlp_bias": True}, "mlp_bias True with attention_bias False: .* Give both or none"),
        ({**LLAMA3_8B, "intermediate_size": 10**12}, "intermediate_size 1000000000000 is above 100000000"),
        ({**QWEN3_30B_A3B, "moe_intermediate_size": 10**12}, "^[^ ]* moe_intermediate_size 1000000000000 is above 100000000"),
        ({**LLAMA3_8B, "vocab_size": 10**15}, "vocab_size 1000000000000000 is above 100000000, .* Give 100000000 or less"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": "all"}, "mlp_only_layers 'all' is no list of layers"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": [True]}, "is no list of layers"),
        ({**QWEN3_30B_A3B, "num_experts": None}, "num_experts is missing"),
        ({**DEEPSEEK_V3, "kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({**GPT_OSS_120B, "layer_types": 3}, "layer_types 3 is no list"),
        ({**GPT_OSS_120B, "layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 36"),
        ("[1, 2]", "holds no JSON object"),
        ("{'hidden_size': 3}", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_of_no_known_model_is_refused(tmp_path, document, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, document)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none.json: No such file or directory. Give the config.json of a model."):
        read_huggingface_config(tmp_path / "none.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read_huggingface_config(tmp_path)
