"""How layers are shared out, against what Megatron-Core builds on each rank and chunk."""

import dataclasses
import doctest
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload.errors import ConfigError
from fgoffload.planner.model import parallelism as module
from fgoffload.planner.model import pipeline_layout
from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.model_shape import ModelShape
from fgoffload.planner.model.parallelism import Parallelism, StageChunk, list_chunks
from fgoffload.planner.model.pipeline_layout import parse_layout

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Parallelism)}
DEEPSEEK_LAYOUT = "Et*3|(tt|)*29m|L"


def make_model(num_layers, *, mtp_num_layers=0, **fields):
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 8, "kv_channels": 8, "ffn_hidden_size": 128}
    defaults = {"name": "model", "vocab_size": 256, "seq_length": 64, **sizes}
    return ModelShape(num_layers=num_layers, mtp_num_layers=mtp_num_layers, **{**defaults, **fields})


def list_numbers(chunks):
    return [[chunk.layers for chunk in rank] for rank in chunks]


@pytest.mark.parametrize("part", [module, pipeline_layout])
def test_the_example_of_the_module_runs(part):
    assert doctest.testmod(part).failed == 0


def test_one_rank_has_the_whole_model():
    assert list_chunks(make_model(3, mtp_num_layers=1), Parallelism()) == (
        (StageChunk(layers=(0, 1, 2, 3), has_embedding=True, has_output=True),),
    )


def test_chunks_of_a_rank_are_a_pipeline_apart():
    parallelism = Parallelism(pipeline_parallel_size=2, virtual_pipeline_size=2, microbatches=2)
    chunks = list_chunks(make_model(8), parallelism)
    assert list_numbers(chunks) == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
    assert [[chunk.has_embedding for chunk in rank] for rank in chunks] == [[True, False], [False, False]]
    assert [[chunk.has_output for chunk in rank] for rank in chunks] == [[False, False], [False, True]]


def test_the_first_and_last_stage_may_have_layers_of_their_own_number():
    # 61 layers on 8 ranks: 57 over 7 ranks do not go, 56 and 5 do.
    parallelism = Parallelism(pipeline_parallel_size=8, num_layers_in_last_pipeline_stage=5)
    assert [len(rank[0].layers) for rank in list_chunks(make_model(61), parallelism)] == [8] * 7 + [5]


def test_embedding_and_loss_may_take_the_place_of_a_layer():
    parallelism = Parallelism(
        pipeline_parallel_size=4,
        virtual_pipeline_size=2,
        microbatches=4,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    chunks = list_numbers(list_chunks(make_model(14), parallelism))
    assert chunks == [[(0,), (7, 8)], [(1, 2), (9, 10)], [(3, 4), (11, 12)], [(5, 6), (13,)]]


def test_a_layout_says_what_is_in_each_stage():
    parallelism = Parallelism(pipeline_parallel_size=16, microbatches=16, pipeline_layout=DEEPSEEK_LAYOUT)
    chunks = list_chunks(make_model(61, mtp_num_layers=1), parallelism)
    assert (parallelism.chunks, parallelism.pipeline.chunks) == (2, 2)
    assert list_numbers(chunks)[0] == [(0, 1, 2), (33, 34)]
    assert list_numbers(chunks)[14] == [(29, 30), (61,)]
    assert chunks[15][1] == StageChunk(layers=(), has_embedding=False, has_output=True)


def test_multi_token_prediction_is_in_the_last_stage_without_a_layout():
    parallelism = Parallelism(pipeline_parallel_size=2, virtual_pipeline_size=2, microbatches=2)
    assert list_numbers(list_chunks(make_model(4, mtp_num_layers=2), parallelism)) == [[(0,), (2,)], [(1,), (3, 4, 5)]]


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("EttL", ("EttL",)),
        ("Et*2,|t*0|L", ("Ett", "", "L")),
        ("E|(t|)*3L", ("E", "t", "t", "t", "L")),
        ("E(t*2|t|)*2L", ("Ett", "t", "tt", "t", "L")),
        ("E|*2L", ("E", "", "L")),
    ],
)
def test_a_layout_repeats_letters_and_brackets(layout, stages):
    assert parse_layout(layout) == stages


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Etx|L", "cannot be read from 'x|L' on"),
        ("Et |L", r"cannot be read from ' \|L' on"),
        ("E(tt)L", r"cannot be read from '\(tt\)L' on"),
        ("E((t|)*2)*2L", "cannot be read"),
        ("E()*2L)", r"cannot be read from '\)' on"),
        ("Et*9999(t*9999)*9999|L", "more than 10000 letters"),
        ("Et|t|L", "stages"),
        ("Ett|L", "has 2 x t, and num_layers is 3. Give 3 x t."),
        ("Ettt|Lm", "has 1 x m, and mtp_num_layers is 0"),
        ("ttt|L", "has 0 x E, and embedding is 1"),
        ("Ettt|LL", "has 2 x L, and loss is 1"),
        ("tEtt|L", "does not begin with the embedding E"),
        ("|EtttL", "does not begin with the embedding E"),
        ("EtttL|", "end with the loss L"),
    ],
)
def test_a_layout_that_is_not_of_the_model_is_refused(layout, message):
    with pytest.raises(ConfigError, match=message):
        list_chunks(make_model(3), Parallelism(pipeline_parallel_size=2, microbatches=2, pipeline_layout=layout))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ett|mt|t|L", "has a layer t behind a layer m"),
        ("Ettt|m|mt|L", "has 2 x m"),
        ("Ett|t|m|L", None),
        ("Ett|tm||L", "has m in stage 1 of 4"),
    ],
)
def test_multi_token_prediction_is_in_the_last_chunk_of_a_rank(layout, message):
    parallelism = Parallelism(pipeline_parallel_size=2, microbatches=2, pipeline_layout=layout)
    model = make_model(layout.count("t"), mtp_num_layers=1)
    if message is None:
        assert list_chunks(model, parallelism)[0][1].layers == (3,)
        return
    with pytest.raises(ConfigError, match=message):
        list_chunks(model, parallelism)


def test_layers_of_multi_token_prediction_are_all_in_one_stage():
    with pytest.raises(ConfigError, match="in one stage"):
        list_chunks(
            make_model(2, mtp_num_layers=2),
            Parallelism(pipeline_parallel_size=2, microbatches=2, pipeline_layout="Et|t|m|mL"),
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size 0 is below 1"),
        ({"microbatches": 0}, "microbatches 0 is below 1"),
        ({"micro_batch_size": 10**9}, "micro_batch_size 1000000000 is above 100000000, which no plan is made for"),
        ({"pipeline_parallel_size": 2, "virtual_pipeline_size": 10**9}, "virtual_pipeline_size 1000000000 is above 100000000"),
        ({"virtual_pipeline_size": 2, "microbatches": 4}, "virtual_pipeline_size 2 with pipeline_parallel_size 1"),
        ({"virtual_pipeline_size": 2, "pipeline_parallel_size": 4}, "microbatches 1 is below pipeline_parallel_size 4"),
        ({"microbatch_group_size": 2}, "microbatch_group_size 2 with virtual_pipeline_size 1 has no effect"),
        (
            {"pipeline_parallel_size": 2, "has_expert_overlap": True},
            "has_expert_overlap with pipeline_parallel_size 2 and virtual_pipeline_size 1",
        ),
        ({"expert_parallel_size": 4, "data_parallel_size": 6}, "do not divide the 6 ranks of a pipeline stage"),
        (
            {"pipeline_layout": "EtL", "account_for_loss_in_pipeline_split": True},
            "^pipeline_layout and account_for_loss_in_pipeline_split are different ways to say how many layers a stage has",
        ),
        (
            {"num_layers_in_first_pipeline_stage": 2, "account_for_embedding_in_pipeline_split": True},
            "^num_layers_in_first_pipeline_stage 2 and account_for_embedding_in_pipeline_split are different ways",
        ),
        ({"pipeline_layout": "Et|t|L", "pipeline_parallel_size": 2}, "has 3 stages for pipeline_parallel_size 2"),
        (
            {"pipeline_layout": "Et|L", "pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "microbatches": 2},
            "has 2 stages for pipeline_parallel_size 2 x virtual_pipeline_size 2",
        ),
    ],
)
def test_ranks_that_no_training_has_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Parallelism(**fields)


def test_two_stages_of_several_chunks_that_both_say_their_layers_are_refused_as_megatron_cannot_build_them():
    fields = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "microbatches": 2}
    ends = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 4}
    with pytest.raises(ConfigError, match="which Megatron-Core cannot build"):
        Parallelism(**fields, **ends)
    unchecked = SimpleNamespace(**{**DEFAULTS, **fields, **ends})
    with pytest.raises(ZeroDivisionError):
        read_megatron(make_model(6), unchecked)
    one = Parallelism(**fields, num_layers_in_last_pipeline_stage=4)
    assert (
        list_numbers(list_chunks(make_model(6), one)) == [[(0,), (3,)], [(1, 2), (4, 5)]] == read_megatron(make_model(6), one)
    )


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ({}, {"pipeline_parallel_size": 4}, "num_layers 6 of model .* are not a multiple of pipeline_parallel_size 4"),
        (
            {},
            {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "microbatches": 2},
            "the 3 layers of pipeline rank 0 of model are not a multiple of virtual_pipeline_size 2",
        ),
        (
            {},
            {"pipeline_parallel_size": 3, "num_layers_in_first_pipeline_stage": 1},
            "stage 1 leave 5 of num_layers 6 of model to the 2 other stages, which cannot share them. Leave a multiple of 2",
        ),
        (
            {},
            {"pipeline_parallel_size": 2, "num_layers_in_first_pipeline_stage": 6},
            "stage 6 leave nothing of num_layers 6 of model to the 1 other stage. Give 5 or less",
        ),
        (
            {},
            {
                "pipeline_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 2,
                "num_layers_in_last_pipeline_stage": 2,
            },
            "2 and .*stage 2 leave out 2 of num_layers 6 of model, and there is no other stage. Give all of the layers",
        ),
        (
            {},
            {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 3},
            "3 and .*stage 3 are of two stages, and pipeline_parallel_size is 1. Give 2 or more, or one of the two",
        ),
        (
            {},
            {"pipeline_parallel_size": 2, "num_layers_in_first_pipeline_stage": 99},
            "^num_layers_in_first_pipeline_stage 99 is above num_layers 6 of model. Give 5 or less, one layer for each other",
        ),
        ({"seq_length": 62}, {"context_parallel_size": 2}, "seq_length 62 of model is not a multiple of 4"),
        ({"seq_length": 62}, {"tensor_parallel_size": 4}, "seq_length 62 of model is not a multiple of 4"),
        ({"num_query_groups": 2}, {"tensor_parallel_size": 4}, "size 4 is more than the 2 num_query_groups .* Give 2 or less"),
        # What no other size of the sequence mends is said first.
        (
            {"num_query_groups": 4, "seq_length": 62},
            {"tensor_parallel_size": 3},
            "tensor_parallel_size 3 does not divide num_query_groups 4 of model. Give a size that does.",
        ),
        ({}, {"tensor_parallel_size": 16}, "tensor_parallel_size 16 does not divide num_attention_heads 8 of model."),
        ({"ffn_hidden_size": 130}, {"tensor_parallel_size": 4}, "size 4 does not divide ffn_hidden_size 130 of model."),
        ({"vocab_size": 250}, {"tensor_parallel_size": 4}, "vocab_size 250 of model .* Give 252"),
        ({}, {"expert_parallel_size": 2, "data_parallel_size": 2}, "expert_parallel_size 2 and model has no experts"),
        (
            {"experts": ExpertsShape(num_experts=6, topk=2, ffn_hidden_size=64)},
            {"expert_parallel_size": 4, "data_parallel_size": 4},
            "expert_parallel_size 4 does not divide num_experts 6",
        ),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(model, fields, message):
    with pytest.raises(ConfigError, match=message):
        list_chunks(make_model(6, **model), Parallelism(**fields))


def test_a_stage_may_have_the_embedding_or_the_loss_alone():
    parallelism = Parallelism(
        pipeline_parallel_size=2,
        virtual_pipeline_size=2,
        microbatches=2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert list_numbers(list_chunks(make_model(2), parallelism)) == [[(), (1,)], [(0,), ()]]
    crowded = Parallelism(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    assert list_numbers(list_chunks(make_model(1), crowded)) == [[(0,)]]


def test_ranks_are_counted():
    parallelism = Parallelism(
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        context_parallel_size=2,
        data_parallel_size=4,
        expert_parallel_size=8,
    )
    assert parallelism.world_size == 48
    assert parallelism.model_parallel_size == 12
    assert parallelism.expert_data_parallel_size == 2  # 16 ranks of a stage, 8 for each copy of the experts


# Megatron's own functions.


def read_megatron(model, parallelism):
    """Return the numbers of the layers that Megatron builds, by rank and chunk, or what it raises."""
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
    prediction = pytest.importorskip("megatron.core.transformer.multi_token_prediction")
    state = pytest.importorskip("megatron.core.parallel_state")
    config = make_megatron_config(model, parallelism)
    size = config.virtual_pipeline_model_parallel_size
    found = []
    with pytest.MonkeyPatch.context() as patch:
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
        num_layers_in_first_pipeline_stage=parallelism.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=parallelism.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=parallelism.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=parallelism.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=parallelism.pipeline_layout,
        cuda_graph_scope=[],  # the default, "full", warns that it is deprecated
    )


@st.composite
def splits(draw):
    """Return a number of layers and how they are shared out: most of them fit, and some do not."""
    ranks = draw(st.integers(2, 5))
    size = draw(st.sampled_from((None, 2, 3)))
    fields = {"pipeline_parallel_size": ranks, "virtual_pipeline_size": size, "microbatches": 60}
    per_rank = draw(st.integers(1, 4)) * (size or 1)
    num_layers = per_rank * ranks
    way = draw(st.sampled_from(("even", "ends", "accounts")))
    if way == "ends":
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if draw(st.booleans()):
                fields[name] = draw(st.integers(1, 3)) * (size or 1)
                num_layers += fields[name] - per_rank
    if way == "accounts":
        for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
            fields[name] = draw(st.booleans())
            num_layers -= fields[name]
    return num_layers + draw(st.sampled_from((0, 0, 0, 1))), draw(st.integers(0, 2)), fields


@settings(deadline=None, max_examples=150)
@given(split=splits())
def test_each_chunk_has_the_layers_that_megatron_builds_there(split):
    num_layers, mtp_num_layers, fields = split
    model = make_model(max(1, num_layers), mtp_num_layers=mtp_num_layers)
    unchecked = SimpleNamespace(**{**DEFAULTS, **fields})
    try:
        found = list_numbers(list_chunks(model, Parallelism(**fields)))
    except ConfigError:
        with pytest.raises((AssertionError, ValueError, ZeroDivisionError)):
            read_megatron(model, unchecked)
        return
    assert found == read_megatron(model, unchecked)


@st.composite
def layouts(draw):
    """Return a layout, its layers and its ranks."""
    ranks, size = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 4), min_size=ranks * size, max_size=ranks * size).filter(any))
    spelled = [f"t*{count}" if draw(st.booleans()) else "t" * count for count in counts]
    mtp_num_layers = draw(st.integers(0, 2))
    holds = draw(st.integers(ranks * (size - 1), ranks * size - 1))
    if mtp_num_layers and not any(counts[holds + 1 :]):
        spelled[holds] += f"{draw(st.sampled_from(('', ',')))}m*{mtp_num_layers}"
    else:
        mtp_num_layers = 0
    layout = f"E{'|'.join(spelled)}L"
    return layout, sum(counts), mtp_num_layers, ranks


@settings(deadline=None, max_examples=150)
@given(layout=layouts())
def test_each_chunk_of_a_layout_has_the_layers_that_megatron_builds_there(layout):
    text, num_layers, mtp_num_layers, ranks = layout
    model = make_model(num_layers, mtp_num_layers=mtp_num_layers)
    parallelism = Parallelism(pipeline_parallel_size=ranks, microbatches=12, pipeline_layout=text)
    assert list_numbers(list_chunks(model, parallelism)) == read_megatron(model, parallelism)


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="EtmL|,", max_size=4), group=st.text(alphabet="tm|", min_size=1, max_size=4), count=st.integers(0, 12)
)
def test_repetitions_are_written_out_as_megatron_writes_them(text, group, count):
    theirs = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout").PipelineParallelLayerLayout
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    for layout in (f"{text}({group})*{count}{text}", f"{text}{group}*{count}", DEEPSEEK_LAYOUT):
        stages = theirs.parse_str_to_list(layout)
        assert parse_layout(layout) == tuple("".join(letters[kind.name] for kind in stage) for stage in stages)


def test_a_layout_of_another_model_is_refused_by_megatron_too():
    parallelism = Parallelism(pipeline_parallel_size=2, microbatches=2, pipeline_layout="Ett|tm||L")
    with pytest.raises(AssertionError):
        read_megatron(make_model(3, mtp_num_layers=1), parallelism)
