"""GPT models of Megatron-Core's local layers: the model chunks of this rank."""

from typing import Any

from fgoffload.integrations.megatron.imports import ignore_expected_warnings, load_module
from fgoffload.integrations.megatron.training_arguments import TrainingArguments


def build_chunks(arguments: TrainingArguments, config: Any) -> list[Any]:
    """Return the model chunks of this rank: one, or as many as the virtual pipeline size says.

    Args:
        arguments: The training.
        config: Megatron's TransformerConfig for it.

    Raises:
        ConfigError: Megatron refuses to build such a model; the error carries its text.
    """
    count = arguments.virtual_pipeline_size
    try:
        with ignore_expected_warnings():
            return [_build_chunk(arguments, config, vp_stage) for vp_stage in (range(count) if count else (None,))]
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise arguments.source.refuse(f"Megatron-Core cannot build this model: {error}") from error


def _build_chunk(arguments: TrainingArguments, config: Any, vp_stage: int | None) -> Any:
    parallel_state = load_module("megatron.core.parallel_state")
    gpt_model = load_module("megatron.core.models.gpt.gpt_model")
    return gpt_model.GPTModel(
        config=config,
        transformer_layer_spec=_build_layer_spec(config, vp_stage),
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_percent=arguments.rotary_percent,
        rotary_base=arguments.rotary_base,
        vp_stage=vp_stage,
    )


def _build_layer_spec(config: Any, vp_stage: int | None) -> Any:
    specs = load_module("megatron.core.models.gpt.gpt_layer_specs")
    if config.num_moe_experts is None:
        return specs.get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
        )
    return specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
