"""Tests that Megatron's config gets only the tags that the installed version accepts."""

import dataclasses
import types

import pytest
from support.versions import is_installed

from fgoffload.integrations.megatron.adapter import model_config


@dataclasses.dataclass
class NewerConfig:
    """A config that accepts one more tag than the released one, and only with the op fuser."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    fine_grained_activation_offloading: bool
    offload_modules: list[str]
    use_transformer_engine_op_fuser: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.offload_modules) - {"core_attn", "moe_act", "fused_group_mlp"}
        if unknown:
            raise ValueError(f"unknown: {unknown}")
        if "fused_group_mlp" in self.offload_modules and not self.use_transformer_engine_op_fuser:
            raise ValueError("fused_group_mlp needs the op fuser")


@pytest.fixture(autouse=True)
def _clear_cache():
    model_config._is_accepted.cache_clear()
    yield
    model_config._is_accepted.cache_clear()


def test_the_released_config_accepts_exactly_the_tags_it_has_call_sites_for():
    newer = ["fused_group_mlp"] if is_installed("0.19") else []
    assert model_config.list_accepted(["qkv_linear", "mlp_fc1", "fused_group_mlp"]) == ["qkv_linear", *newer]


def test_op_fuser_tags_are_accepted_if_the_config_has_an_op_fuser(monkeypatch):
    monkeypatch.setattr(model_config, "load_module", lambda name: types.SimpleNamespace(TransformerConfig=NewerConfig))
    assert model_config.list_accepted(["moe_act", "fused_group_mlp", "mlp_fc1"]) == ["moe_act", "fused_group_mlp"]
