"""Compares the layers of each chunk with those that Megatron-Core builds on each rank."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.versions import find_graph_field

from fgoffload.errors import ConfigError
from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism, list_chunks

END_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
ACCOUNT_FLAGS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Parallelism)}


def make_model(num_layers, *, mtp_num_layers=0, **fields):
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 8, "kv_channels": 8, "ffn_hidden_size": 128}
    defaults = {"name": "model", "vocab_size": 256, "seq_length": 64, **sizes}
    return ModelShape(num_layers=num_layers, mtp_num_layers=mtp_num_layers, **{**defaults, **fields})


def list_numbers(chunks):
    return [[chunk.layers for chunk in rank] for rank in chunks]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Etx|L", "is invalid at 'x|L'"),
        ("Et|t|L", "stages"),
        ("Ett|L", "has 2 x t, but num_layers is 3. Use 3 x t."),
        ("tEtt|L", "must begin with the embedding E"),
    ],
)
def test_a_layout_that_does_not_match_the_model_is_rejected(layout, message):
    with pytest.raises(ConfigError, match=message):
        list_chunks(make_model(3), Parallelism(pipeline_parallel_size=2, microbatches=2, pipeline_layout=layout))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size 0 is below 1"),
        ({"virtual_pipeline_size": 2, "pipeline_parallel_size": 4}, "microbatches 1 is below pipeline_parallel_size 4"),
        ({"pipeline_layout": "EtL", "account_for_loss_in_pipeline_split": True}, "^pipeline_layout and"),
    ],
)
def test_invalid_parallelism_is_rejected(fields, message):
    with pytest.raises(ConfigError, match=message):
        Parallelism(**fields)


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ({}, {"pipeline_parallel_size": 4}, "num_layers 6 of model is not a multiple of pipeline_parallel_size 4"),
        ({}, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "microbatches": 2}, "rank 0 of model has 3 layers"),
        ({}, {"pipeline_parallel_size": 2, "num_layers_in_first_pipeline_stage": 6}, "stage 6: 0 of num_layers 6"),
        ({"seq_length": 62}, {"context_parallel_size": 2}, "seq_length 62 of model is not a multiple of 4"),
        ({"num_query_groups": 2}, {"tensor_parallel_size": 4}, "size 4 does not divide num_query_groups 2 of model."),
        ({"ffn_hidden_size": 130}, {"tensor_parallel_size": 4}, "size 4 does not divide ffn_hidden_size 130 of model."),
        (
            {"experts": ExpertsShape(num_experts=6, topk=2, ffn_hidden_size=64)},
            {"expert_parallel_size": 4, "data_parallel_size": 4},
            "expert_parallel_size 4 does not divide num_experts 6",
        ),
    ],
)
def test_a_model_that_does_not_split_over_the_ranks_is_rejected(model, fields, message):
    with pytest.raises(ConfigError, match=message):
        list_chunks(make_model(6, **model), Parallelism(**fields))


def list_megatron_layers(model, parallelism):
    """Return the numbers of the layers that Megatron builds, by rank and chunk."""
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
    prediction = pytest.importorskip("megatron.core.transformer.multi_token_prediction")
    state = pytest.importorskip("megatron.core.parallel_state")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")  # only rank 0 logs a layout, and 0.19 warns if the rank is unknown
        config = make_megatron_config(model, parallelism)
        size = config.virtual_pipeline_model_parallel_size
        patch.setattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: size)
        patch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: parallelism.pipeline_parallel_size)
        for rank in range(parallelism.pipeline_parallel_size):
            patch.setattr(state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
            row = []
            for chunk in range(size or 1):
                stage = None if size is None else chunk
                begin = layer.get_transformer_layer_offset(config, stage, rank)
                count = block.get_num_layers_to_build(config, stage, rank)
                behind = model.num_layers + prediction.get_mtp_layer_offset(config, stage)
                predicted = prediction.get_mtp_num_layers_to_build(config, stage, rank)
                row.append((*range(begin, begin + count), *range(behind, behind + predicted)))
            found.append(row)
    return found


def make_megatron_config(model, parallelism):
    torch = pytest.importorskip("torch")
    transformer = pytest.importorskip("megatron.core.transformer.transformer_config")
    return transformer.TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_dtype=torch.float32,
        mtp_num_layers=model.mtp_num_layers or None,
        pipeline_model_parallel_size=parallelism.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=parallelism.virtual_pipeline_size,
        pipeline_model_parallel_layout=parallelism.pipeline_layout,
        **{name: getattr(parallelism, name) for name in (*END_STAGES, *ACCOUNT_FLAGS)},
        **{find_graph_field(): []},
    )


@st.composite
def splits(draw):
    """Return a number of layers and their split over ranks, which is valid in most cases."""
    ranks = draw(st.integers(2, 5))
    size = draw(st.sampled_from((None, 2, 3)))
    fields = {"pipeline_parallel_size": ranks, "virtual_pipeline_size": size, "microbatches": 60}
    per_rank = draw(st.integers(1, 4)) * (size or 1)
    num_layers = per_rank * ranks
    kind = draw(st.sampled_from(("even", "ends", "accounts")))
    if kind == "ends":
        for name in END_STAGES:
            if draw(st.booleans()):
                fields[name] = draw(st.integers(1, 3)) * (size or 1)
                num_layers += fields[name] - per_rank
    if kind == "accounts":
        for name in ACCOUNT_FLAGS:
            fields[name] = draw(st.booleans())
            num_layers -= fields[name]
    return num_layers + draw(st.sampled_from((0, 0, 0, 1))), draw(st.integers(0, 2)), fields


@settings(deadline=None, max_examples=50)
@given(split=splits())
def test_each_chunk_has_the_layers_that_megatron_builds(split):
    num_layers, mtp_num_layers, fields = split
    model = make_model(max(1, num_layers), mtp_num_layers=mtp_num_layers)
    unchecked = SimpleNamespace(**{**DEFAULTS, **fields})
    try:
        found = list_numbers(list_chunks(model, Parallelism(**fields)))
    except ConfigError:
        with pytest.raises((AssertionError, ValueError, ZeroDivisionError)):
            list_megatron_layers(model, unchecked)
        return
    assert found == list_megatron_layers(model, unchecked)


@st.composite
def layouts(draw):
    """Return a layout, its numbers of decoder and MTP layers, and its number of ranks."""
    ranks, size = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 4), min_size=ranks * size, max_size=ranks * size).filter(any))
    spelled = [f"t*{count}" if draw(st.booleans()) else "t" * count for count in counts]
    mtp_num_layers = draw(st.integers(0, 2))
    mtp_stage = draw(st.integers(ranks * (size - 1), ranks * size - 1))
    if mtp_num_layers and not any(counts[mtp_stage + 1 :]):
        spelled[mtp_stage] += f"{draw(st.sampled_from(('', ',')))}m*{mtp_num_layers}"
    else:
        mtp_num_layers = 0
    layout = f"E{'|'.join(spelled)}L"
    return layout, sum(counts), mtp_num_layers, ranks


@settings(deadline=None, max_examples=50)
@given(layout=layouts())
def test_each_chunk_of_a_layout_has_the_layers_that_megatron_builds(layout):
    text, num_layers, mtp_num_layers, ranks = layout
    model = make_model(num_layers, mtp_num_layers=mtp_num_layers)
    parallelism = Parallelism(pipeline_parallel_size=ranks, microbatches=12, pipeline_layout=text)
    assert list_numbers(list_chunks(model, parallelism)) == list_megatron_layers(model, parallelism)
