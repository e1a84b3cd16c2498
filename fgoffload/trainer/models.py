"""Builds this rank's chunks of a Megatron-Core GPT model, from local layers or Transformer Engine layers."""

from collections.abc import Iterable
from typing import Any

from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.trainer.training_arguments import TrainingArguments


def build_chunks(arguments: TrainingArguments, config: Any) -> list[Any]:
    """Build this rank's model chunks: one, or `virtual_pipeline_size` chunks with a virtual pipeline.

    Raises:
        ConfigError: Megatron rejects the model. The error includes Megatron's message.
    """
    count = arguments.virtual_pipeline_size
    try:
        with ignore_expected_warnings():
            return [_build_chunk(arguments, config, vp_stage) for vp_stage in (range(count) if count else (None,))]
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise arguments.source.refuse(f"Megatron-Core cannot build this model: {error}") from error


def clear_rotary_caches(chunks: Iterable[Any]) -> None:
    """Clear the caches of Megatron's rotary embeddings.

    Their class caches `forward` with `lru_cache`, which would keep the modules and their `[s, 1, 1, d]` results alive.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        clear = getattr(type(module).forward, "cache_clear", None)
        if clear is not None:
            clear()


def _build_chunk(arguments: TrainingArguments, config: Any, vp_stage: int | None) -> Any:
    parallel_state = load_module("megatron.core.parallel_state")
    gpt_model = load_module("megatron.core.models.gpt.gpt_model")
    layer_spec = load_module("megatron.core.models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return gpt_model.GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_percent=arguments.rotary_percent,
        rotary_base=arguments.rotary_base,
        mtp_block_spec=_build_mtp_spec(config, layer_spec, vp_stage),
        vp_stage=vp_stage,
    )


def _build_mtp_spec(config: Any, layer_spec: Any, vp_stage: int | None) -> Any:
    """Return the spec of the multi-token prediction layers, or None if the model has none."""
    if not config.mtp_num_layers:
        return None
    specs = load_module("megatron.core.models.gpt.gpt_layer_specs")
    uses_transformer_engine = config.transformer_impl == "transformer_engine"
    if not layer_spec.layer_specs:
        # This stage has no decoder layers, so we use the spec of the decoder's last layer.
        layer_spec = specs.get_gpt_decoder_layer_specs(
            config, uses_transformer_engine, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
        )[-1]
    return specs.get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=uses_transformer_engine, vp_stage=vp_stage)
