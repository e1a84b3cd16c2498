"""Tests models read from `config.json`, using the published files on Hugging Face."""

import json
from pathlib import Path

import pytest

from fgoffload.errors import ConfigError
from fgoffload.planner.model.huggingface import read_huggingface_config
from fgoffload.planner.model.layer_shape import DEFAULT_IMBALANCE, ExpertsShape, RouterShape
from fgoffload.planner.model.parallelism import Parallelism
from fgoffload.planner.model.parameters import count_rank_parameters

CONFIGS = json.loads(Path(__file__).with_name("configs.json").read_text(encoding="utf-8"))
"""Models with their published parameter counts, in billions. Some parts of the last three are not modelled."""
LLAMA3_8B, QWEN2_7B, QWEN3_30B_A3B, MIXTRAL_8X7B, DEEPSEEK_V3, GPT_OSS_120B, *_ = (
    entry["config"] for entry in CONFIGS.values()
)


def read(tmp_path, document, **options):
    path = tmp_path / "config.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return read_huggingface_config(path, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_counts_match_the_published_ones(tmp_path, name):
    model = read(tmp_path, CONFIGS[name]["config"])
    assert count_rank_parameters(model, Parallelism(), 0).count / 1e9 == pytest.approx(CONFIGS[name]["billions"], rel=5e-4)


def test_dense_layers_follow_the_sparse_step_and_mlp_only_layers(tmp_path):
    document = {**QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    # Every second layer has experts, starting with the second, except the fourth, which `mlp_only_layers` lists.
    assert read(tmp_path, document).moe_layers == (False, True, False, False, False, True)


def test_experts_of_deepseek_v3_are_read(tmp_path):
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


def test_gpt_oss_has_windows_sinks_biases_and_quick_gelu(tmp_path):
    model = read(tmp_path, GPT_OSS_120B)
    assert model.has_quick_gate
    assert not read(tmp_path, QWEN3_30B_A3B).has_quick_gate
    assert (model.window_tokens, model.window_layers) == (127, (True, False) * 18)
    assert (model.has_attention_sinks, model.has_linear_bias, model.kv_channels) == (True, True, 64)
    assert not model.has_fused_rotary
    assert model.experts == ExpertsShape(num_experts=128, topk=4, ffn_hidden_size=2880, imbalance=DEFAULT_IMBALANCE)
    without = {name: value for name, value in GPT_OSS_120B.items() if name != "layer_types"}
    assert read(tmp_path, without).window_layers == (True, False) * 18


def test_attention_windows_follow_the_layer_types(tmp_path):
    windows = {name: read(tmp_path, CONFIGS[name]["config"]) for name in ("gemma3_27b", "llama4_scout", "qwen3_next")}
    assert {name: (model.window_tokens, model.window_layers[:8]) for name, model in windows.items()} == {
        "gemma3_27b": (1023, (True,) * 5 + (False,) + (True,) * 2),
        "llama4_scout": (4096, (True, True, True, False) * 2),
        "qwen3_next": (64, (True, True, True, False) * 2),
    }


def test_a_warning_names_unmodelled_parts_and_the_direction_of_the_error(tmp_path, caplog):
    read(tmp_path, CONFIGS["qwen3_next"]["config"])
    (record,) = caplog.records
    assert record.message.endswith("weights, saved bytes and attention times are too low.")


def drop_fields(document, *names):
    return {name: value for name, value in document.items() if name not in names}


@pytest.mark.parametrize(
    ("document", "names", "expected"),
    [
        (LLAMA3_8B, ("num_key_value_heads",), {"num_query_groups": 32}),
        (QWEN2_7B, ("use_sliding_window", "sliding_window", "max_window_layers"), {"window_tokens": None}),
        (QWEN3_30B_A3B, ("decoder_sparse_step", "mlp_only_layers"), {"moe_layers": (True,) * 48}),
        (DEEPSEEK_V3, ("first_k_dense_replace", "moe_layer_freq"), {"moe_layers": (False,) * 3 + (True,) * 58}),
        (GPT_OSS_120B, ("head_dim", "sliding_window", "num_key_value_heads"), {"kv_channels": 64, "window_tokens": 127}),
    ],
)
def test_missing_fields_use_the_defaults_of_transformers(tmp_path, document, names, expected):
    model = read(tmp_path, drop_fields(document, *names))
    assert {name: getattr(model, name) for name in expected} == expected


def test_null_differs_from_a_missing_field(tmp_path):
    assert read(tmp_path, {**MIXTRAL_8X7B, "num_key_value_heads": None}).num_query_groups == 32
    assert read(tmp_path, {**GPT_OSS_120B, "hidden_size": 3072, "head_dim": None}).kv_channels == 48
    assert read(tmp_path, {**GPT_OSS_120B, "sliding_window": None}).window_tokens is None
    assert read(tmp_path, {**DEEPSEEK_V3, "q_lora_rank": None}).latent.q_lora_rank is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"model_type": "bloom", "vocab_size": 9}, "'bloom' is not supported. .* write an argument file.*-size 9"),
        ({**LLAMA3_8B, "model_type": "qwen3_mo"}, "Did you mean 'qwen3_moe'?"),
        ({**LLAMA3_8B, "num_hidden_layers": None}, "num_hidden_layers is missing. Add it"),
        ({**LLAMA3_8B, "hidden_size": "4096"}, "hidden_size '4096' is not a whole number"),
        ({**QWEN3_30B_A3B, "num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is above 1000, .* Use 1000 or less"),
        ({**LLAMA3_8B, "hidden_size": 4097}, "hidden_size 4097 is not a multiple of num_attention_heads 32, and head_dim is"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": [99, -1]}, r"mlp_only_layers \[99, -1\] must be a list of layers from 0 to 47"),
        ({**LLAMA3_8B, "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: .* Use silu, or plan from"),
        ({**MIXTRAL_8X7B, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is above num_local_experts 8. Use 8 or less"),
        ({**LLAMA3_8B, "head_dim": 7}, "head_dim 7 of .* is not a multiple of 8, .* Measure the model instead"),
        ({**DEEPSEEK_V3, "num_key_value_heads": 8}, "num_key_value_heads 8 differs from num_attention_heads 128, .* Use 128"),
        ("[1, 2]", "is not a JSON object"),
        ("{'hidden_size': 3}", "is not JSON"),
    ],
)
def test_an_unsupported_config_is_rejected(tmp_path, document, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, document)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)
