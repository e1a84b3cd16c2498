"""Hybrid Megatron-Core models on the CPU, with local attention and MLP layers in a given pattern."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.trainer import models


@contextlib.contextmanager
def hybrid_models(pattern: str) -> Iterator[None]:
    """Let training build a hybrid model: `*` is an attention layer, `-` an MLP layer, `/` starts an MTP depth."""
    norm = load_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    model = load_module("megatron.core.models.hybrid.hybrid_model").HybridModel

    def build(arguments: Any, config: Any, vp_stage: int | None) -> Any:
        return model(
            config,
            _build_spec(),
            vocab_size=arguments.padded_vocab_size,
            max_sequence_length=arguments.max_position_embeddings,
            hybrid_layer_pattern=pattern,
            position_embedding_type=arguments.position_embedding_type,
            vp_stage=vp_stage,
        )

    with mock.patch.object(models, "_build_chunk", build), mock.patch("megatron.core.models.hybrid.hybrid_block.TENorm", norm):
        yield


def _build_spec() -> Any:
    layers = load_module("megatron.core.transformer.transformer_layer")
    mtp = load_module("megatron.core.transformer.multi_token_prediction")
    hybrid = load_module("megatron.core.models.hybrid.hybrid_block")
    spec = load_module("megatron.core.transformer.spec_utils").ModuleSpec
    whole = load_module("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(normalization="RMSNorm").submodules

    def select(*names: str) -> Any:
        return dataclasses.replace(layers.TransformerLayerSubmodules(), **{name: getattr(whole, name) for name in names})

    backend = load_module("megatron.core.models.backends").LocalSpecProvider()
    depth = mtp.get_mtp_layer_spec_for_backend(None, backend)
    submodules = hybrid.HybridStackSubmodules(
        attention_layer=spec(layers.TransformerLayer, submodules=select("input_layernorm", "self_attention", "self_attn_bda")),
        mlp_layer=spec(
            load_module("megatron.core.ssm.mlp_layer").MLPLayer, submodules=select("pre_mlp_layernorm", "mlp", "mlp_bda")
        ),
        mtp_block_spec=spec(
            mtp.MultiTokenPredictionBlock, submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[depth])
        ),
    )
    return spec(hybrid.HybridStack, submodules=submodules)
