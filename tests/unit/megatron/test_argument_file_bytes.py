"""The planner's formulas against Megatron's own code, for the layers of each file of `arguments/`, on the CPU.

Megatron's local layers, with stand-ins for the kernels of Transformer Engine (`support/fused_kernels.py`). What the real ones
save needs a GPU to be seen: `tests/gpu/test_megatron_bytes.py` has the same models.
"""

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from support.fused_kernels import fused_kernels
from support.processes import run_processes
from support.shrunk_models import FILES, ONE_RANK, balanced_routing, find_layout, list_layers, shrink
from support.trainings import make_config

from fgoffload.integrations.megatron.argument_files import read_argument_file
from fgoffload.integrations.megatron.arguments import parse_arguments
from fgoffload.integrations.megatron.data import TextData
from fgoffload.integrations.megatron.model_shapes import read_model
from fgoffload.integrations.megatron.training import Trainer
from fgoffload.planner.memory.saved_bytes import count_tag_bytes

pytestmark = pytest.mark.usefixtures("parallel")

LOCAL = {"--transformer-impl": ("local",), "--no-moe-grouped-gemm": (), "--no-moe-permute-fusion": ()}
"""What Transformer Engine alone has; grouped experts have a stand-in."""
SCRIPT = Path(__file__).parents[2] / "gpu" / "measure_megatron_bytes.py"
LAYOUTS = {name: find_layout(name, ranks=2) for name in FILES}
SHARED = [
    (layout, name)
    for layout in dict.fromkeys(LAYOUTS.values())  # one object for all of its files, by which pytest knows the fixture
    for name in FILES
    if LAYOUTS[name] == layout != ONE_RANK
]
"""The layout on two ranks of each file whose own ranks share layers or experts, and its name."""


def predict(model, *, is_deterministic):
    """Return what the formulas say for one step of a small model on one rank, by tag."""
    found = {}
    for layer in model.layers:
        shape = dataclasses.replace(layer, has_fused_norms=False, is_deterministic=is_deterministic)
        for tag, size_bytes in count_tag_bytes(shape).items():
            if tag != "layer_input":
                found[tag] = found.get(tag, 0) + size_bytes
    return found


def measure(flags, tags, *, is_deterministic):
    """Return the bytes that left and those that others had taken away in one step, by tag."""
    arguments, config = (
        parse_arguments(flags.split(), source="test", world_size=1),
        make_config(*tags, min_offloaded_tensor_size=1),
    )
    with (
        fused_kernels(),
        balanced_routing(),
        contextlib.closing(Trainer(arguments, TextData.load(), offload=config)) as trainer,
    ):
        torch.use_deterministic_algorithms(mode=is_deterministic, warn_only=True)
        trainer.run_step(with_digests=False)
        return {tag: found.d2h_bytes + found.shared_bytes for tag, found in trainer.integration.last_step.tags.items()}


@pytest.mark.parametrize("is_deterministic", [True, False], ids=["deterministic", "any"])
@pytest.mark.parametrize("name", FILES)
def test_each_layer_of_a_file_saves_the_bytes_of_the_formulas(name, is_deterministic):
    model = shrink(name, changes=LOCAL)
    expected = predict(model, is_deterministic=is_deterministic)
    assert measure(model.flags, tuple(expected), is_deterministic=is_deterministic) == expected


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    """Return what the files that have a layout saved on each rank, by name."""
    layout = request.param
    return measure_ranks(
        {name: shrink(name, layout, changes=LOCAL) for one, name in SHARED if one == layout}, layout, tmp_path_factory
    )


def measure_ranks(models, layout, tmp_path_factory):
    """Return what small models saved on each rank, by name, with the models."""
    trainings = {
        name: {"flags": model.flags, "tags": list(predict(model, is_deterministic=False))} for name, model in models.items()
    }
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "request.json").write_text(json.dumps({"trainings": trainings, "is_deterministic": False}))
    run_processes(str(SCRIPT), folder, processes=layout.ranks, timeout_seconds=110)
    return {
        name: ([json.loads((folder / f"result-{rank}.json").read_text())[name] for rank in range(layout.ranks)], model)
        for name, model in models.items()
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("measured", "name"), SHARED, indirect=["measured"], scope="module", ids=str)
def test_each_rank_saves_the_bytes_of_the_formulas_where_two_share_layers_or_experts(name, measured):
    results, model = measured[name]
    for result in results:
        assert isinstance(result, dict), result
        assert result["bytes"] == predict(model, is_deterministic=False)
        # As many of each expert: the formulas are for routing that is balanced over ranks.
        assert all(len(set(rows)) == 1 for rows in result["rows"])


def share_no_sequence(model):
    """Return a small model whose ranks all have the whole sequence between the linears that they share."""
    layers = tuple(dataclasses.replace(shape, has_sequence_parallel=False) for shape in model.layers)
    return model._replace(flags=model.flags.replace(" --sequence-parallel", ""), layers=layers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["llama3_70b"])
def test_each_rank_saves_the_bytes_of_the_formulas_where_two_share_layers_and_no_sequence(name, tmp_path_factory):
    shared = shrink(name, LAYOUTS[name], changes=LOCAL)
    model = share_no_sequence(shared)
    assert LAYOUTS[name].tensor == 2
    assert predict(model, is_deterministic=False) != predict(shared, is_deterministic=False)
    results, _ = measure_ranks({name: model}, LAYOUTS[name], tmp_path_factory)[name]
    assert [result["bytes"] for result in results] == [predict(model, is_deterministic=False)] * 2


# What shrinking leaves: everything but sizes, and whether they differ.

SIZES = (
    *("seq_length", "hidden_size", "qk_channels", "v_channels"),
    *("rotary_channels", "micro_batch_size", "tensor_parallel_size"),
)
DISPATCHER = ("--moe-token-dispatcher-type", "alltoall")
"""Which the smallest model does not name."""


def list_kinds(layers):
    """Return what the layers are, but for their sizes: each kind once, in their order."""
    return list(dict.fromkeys(strip(shape) for shape in layers))


def strip(shape):
    """Return `shape` with 1 for each size, and the ratios of those that belong together."""
    queries = shape.num_attention_heads // shape.num_query_groups
    sizes = dict.fromkeys(SIZES, 1) | {"num_query_groups": 1, "num_attention_heads": queries}
    latent, experts = shape.latent, shape.experts
    if latent is not None:
        low = None if latent.q_lora_rank is None else 1
        latent = dataclasses.replace(latent, q_lora_rank=low, kv_lora_rank=1, qk_pos_emb_head_dim=1)
    if experts is not None:
        experts = dataclasses.replace(
            experts,
            num_experts=experts.topk,
            ffn_hidden_size=1,
            shared_ffn_hidden_size=experts.shared_ffn_hidden_size // experts.ffn_hidden_size,
            expert_parallel_size=1,
            expert_tensor_parallel_size=1,
            imbalance=1.0,
        )
    else:
        sizes["ffn_hidden_size"] = 1
    # Ranks that share nothing have all of the sequence anyway.
    return dataclasses.replace(shape, latent=latent, experts=experts, has_sequence_parallel=True, **sizes)


@pytest.mark.parametrize("name", FILES)
def test_a_small_model_has_each_kind_of_layer_of_its_file(name):
    file = [*read_argument_file(FILES[name]), "--bf16", *DISPATCHER]
    model, parallelism = read_model(file, source=name)
    assert list_kinds(shrink(name).layers) == list_kinds(list_layers(model, parallelism))


def test_windows_and_groups_of_experts_are_left_too():
    assert "--window-size 23,0 --window-attn-skip-freq [1,0] --softmax-type learnable" in shrink("gpt_oss_120b").flags
    assert "--moe-router-num-groups 8 --moe-router-group-topk 4" in shrink("deepseek_v3").flags
