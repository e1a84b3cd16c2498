"""Compares the planner's parameters of each rank with models that Megatron-Core builds on the CPU.

One process builds the models of all ranks with fake process groups: building a model only needs their size and rank.
"""

import dataclasses

import pytest
import torch
from support.attention import ReferenceAttention
from support.versions import find_graph_field

from fgoffload.environment import keep_environment
from fgoffload.integrations.megatron.patching.cpu_support import apply_cpu_support
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings
from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.model_shape import LatentAttention, ModelShape
from fgoffload.planner.model.parallelism import Parallelism, list_chunks
from fgoffload.planner.model.parameters import count_rank_parameters
from fgoffload.trainer.parallel import ATTENTION_BACKENDS

state = pytest.importorskip("megatron.core.parallel_state")
gpt_model = pytest.importorskip("megatron.core.models.gpt.gpt_model")
specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
transformer = pytest.importorskip("megatron.core.transformer.transformer_config")

pytestmark = [
    pytest.mark.usefixtures("parallel"),
    # Megatron warns for each linear of an expert that is not split over ranks.
    pytest.mark.filterwarnings("ignore:`sequence_parallel` is set to `True`, but tensor model parallel size is 1"),
]

SIZES = {
    "name": "tiny",
    "num_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 10,
    "vocab_size": 256,
    "seq_length": 32,
}
EXPERTS = ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=20, shared_ffn_hidden_size=12)
DENSE = ModelShape(**SIZES, ffn_hidden_size=28)
BIASED = ModelShape(
    **SIZES,
    ffn_hidden_size=28,
    normalization="LayerNorm",
    is_gated=False,
    has_linear_bias=True,
    has_tied_embeddings=True,
    has_qk_norm=True,
    learned_positions=40,
)
MIXED = ModelShape(
    **SIZES, ffn_hidden_size=28, has_qkv_bias=True, experts=EXPERTS, moe_layers=(False, True, True, True), mtp_num_layers=1
)
BIASED_EXPERTS = ModelShape(
    **SIZES,
    experts=ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=20),
    has_linear_bias=True,
    has_tied_embeddings=True,
    mtp_num_layers=2,
)
LATENT = ModelShape(
    **SIZES | {"num_query_groups": 8, "kv_channels": 0},
    ffn_hidden_size=28,
    has_qk_norm=True,
    latent=LatentAttention(q_lora_rank=14, kv_lora_rank=18, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=7),
)
MODELS = {"dense": DENSE, "biased": BIASED, "mixed": MIXED, "biased experts": BIASED_EXPERTS, "latent": LATENT}


class Group:
    """A fake process group with a size and a rank."""

    def __init__(self, size, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu():
    with apply_cpu_support(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(specs.LocalSpecProvider, "core_attention", lambda _: ReferenceAttention)
        yield


def make_config(model, parallelism):
    """Return Megatron's config for `model` with local layers."""
    fields = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size or 4 * model.hidden_size,
        "normalization": model.normalization,
        "gated_linear_unit": model.is_gated,
        "activation_func": torch.nn.functional.silu if model.is_gated else torch.nn.functional.gelu,
        "add_bias_linear": model.has_linear_bias,
        "add_qkv_bias": model.has_qkv_bias,
        "qk_layernorm": model.has_qk_norm,
        "mtp_num_layers": model.mtp_num_layers or None,
        "tensor_model_parallel_size": parallelism.tensor_parallel_size,
        "sequence_parallel": parallelism.tensor_parallel_size > 1,
        "pipeline_model_parallel_size": parallelism.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": parallelism.virtual_pipeline_size,
        "pipeline_model_parallel_layout": parallelism.pipeline_layout,
        "expert_model_parallel_size": parallelism.expert_parallel_size,
        "expert_tensor_parallel_size": parallelism.expert_tensor_parallel_size,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        find_graph_field(): [],
    }
    if model.experts is not None:
        fields |= {
            "num_moe_experts": model.experts.num_experts,
            "moe_router_topk": model.experts.topk,
            "moe_ffn_hidden_size": model.experts.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": model.experts.shared_ffn_hidden_size or None,
            "moe_token_dispatcher_type": "alltoall",
            "moe_layer_freq": [int(flag) for flag in model.moe_layers or (True,) * model.num_layers],
        }
    if model.latent is None:
        groups = {"num_query_groups": model.num_query_groups, "kv_channels": model.kv_channels}
        return transformer.TransformerConfig(**fields, **groups)
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    latent = {name: getattr(model.latent, name) for name in names}
    return transformer.MLATransformerConfig(**fields, **latent, multi_latent_attention=True, rope_type="rope")


def make_spec(model, config, stage):
    if model.experts is not None:
        return specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    return specs.get_gpt_layer_local_spec(
        qk_layernorm=model.has_qk_norm, multi_latent_attention=model.latent is not None, normalization=model.normalization
    )


def build_rank(model, parallelism, rank):
    """Return the model chunks that Megatron builds on a pipeline rank."""
    groups = {
        "get_tensor_model_parallel_group": Group(parallelism.tensor_parallel_size),
        "get_pipeline_model_parallel_group": Group(parallelism.pipeline_parallel_size, rank),
        "get_expert_model_parallel_group": Group(parallelism.expert_parallel_size),
        "get_expert_tensor_parallel_group": Group(parallelism.expert_tensor_parallel_size),
    }
    config = make_config(model, parallelism)
    with pytest.MonkeyPatch.context() as patch, ignore_expected_warnings(), keep_environment(ATTENTION_BACKENDS):
        for name, group in groups.items():
            patch.setattr(state, name, lambda *_, group=group, **__: group)
        patch.setattr(state, "get_pipeline_model_parallel_rank", lambda: rank)
        patch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: parallelism.pipeline_parallel_size)
        patch.setattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: parallelism.virtual_pipeline_size)
        chunks = list_chunks(model, parallelism)[rank]
        return [build_chunk(model, config, chunk, number, parallelism) for number, chunk in enumerate(chunks)]


def build_chunk(model, config, chunk, number, parallelism):
    stage = None if parallelism.virtual_pipeline_size is None else number
    spec = make_spec(model, config, stage)
    is_last = any(layer >= model.num_layers for layer in chunk.layers)
    return gpt_model.GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.learned_positions or model.seq_length,
        pre_process=chunk.has_embedding,
        post_process=chunk.has_output,
        share_embeddings_and_output_weights=model.has_tied_embeddings,
        position_embedding_type="learned_absolute" if model.learned_positions else "rope",
        mtp_block_spec=specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
        if is_last
        else None,
        vp_stage=stage,
    )


def count(chunks):
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


def check_ranks(model, parallelism, ranks=2):
    for rank in range(ranks):
        assert count_rank_parameters(model, parallelism, rank).count == count(build_rank(model, parallelism, rank))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_per_rank_match_the_models_that_megatron_builds(name):
    model = MODELS[name]
    check_ranks(model, Parallelism(), ranks=1)
    for virtual_size in (None, 2):
        check_ranks(model, Parallelism(pipeline_parallel_size=2, virtual_pipeline_size=virtual_size, microbatches=4))
    if name != "latent":
        check_ranks(model, Parallelism(pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=4))


def test_parameters_of_an_mtp_only_stage_match_megatron():
    parallelism = Parallelism(pipeline_parallel_size=2, pipeline_layout="Etttt|mL", microbatches=4)
    check_ranks(dataclasses.replace(DENSE, mtp_num_layers=1), parallelism)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(("mixed", sizes) for sizes in ((1, 4, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2))),
        ("biased experts", (2, 2, 1)),  # Megatron supports biases only in experts that are not split over ranks
    ],
    ids=str,
)
def test_expert_parameters_per_rank_match_megatron(name, sizes):
    model, (tensor, experts, expert_tensor) = MODELS[name], sizes
    parallelism = Parallelism(
        tensor_parallel_size=tensor,
        expert_parallel_size=experts,
        expert_tensor_parallel_size=expert_tensor,
        data_parallel_size=4,
    )
    found, built = count_rank_parameters(model, parallelism, 0), build_rank(model, parallelism, 0)
    # Megatron marks expert parameters, whose gradients are reduced over other ranks.
    expert_counts = [p.numel() for chunk in built for p in chunk.parameters() if not getattr(p, "allreduce", True)]
    assert found.count == count(built)
    if experts > 1:
        assert found.expert_count == sum(expert_counts)
