"""Compares the planner's formulas with Megatron's own code on the CPU, for the layers of each file of `arguments/`.

The tests use Megatron's local layers with stand-ins for Transformer Engine's kernels (`support/fused_kernels.py`).
`tests/gpu/test_megatron_bytes.py` tests the same models with the real kernels, which need a GPU.
"""

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from support.fused_kernels import fused_kernels
from support.pipeline import IMPORTS
from support.processes import run_processes
from support.shrunk_models import FILES, ONE_RANK, balanced_routing, find_layout, shrink
from support.trainings import make_config
from support.versions import is_installed

from fgoffload.planner.memory.saved_bytes import list_saved_tensors
from fgoffload.trainer.arguments import parse_arguments
from fgoffload.trainer.data import TextData
from fgoffload.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("parallel")

LOCAL = {"--transformer-impl": ("local",), "--no-moe-grouped-gemm": (), "--no-moe-permute-fusion": ()}
"""Flag changes that avoid features of Transformer Engine; grouped experts have a stand-in."""
LOCAL_NORMS = {
    "layer input": "attn_norm",
    "statistics of the norm before attention": "attn_norm",
    "residual": "mlp_norm",
    "statistics of the norm before the MLP": "mlp_norm",
}
"""Tags of the tensors that separate norms save. Transformer Engine fuses these norms into the next linear."""
SCRIPT = Path(__file__).parents[2] / "gpu" / "measure_megatron_bytes.py"
# Uncompressed queries have a norm only since 0.19; the formulas count it.
FILES = [name for name in FILES if name != "deepseek_v2_lite" or is_installed("0.19")]
LAYOUTS = {name: find_layout(name, ranks=2) for name in FILES}
SHARED = [
    (layout, name)
    for layout in dict.fromkeys(LAYOUTS.values())  # one object per layout, so that pytest reuses the fixture
    for name in FILES
    if LAYOUTS[name] == layout != ONE_RANK
]
"""Two-rank layout and name of each file whose ranks share layers or experts."""


def predict(model, *, is_deterministic):
    """Return the bytes per tag that the formulas predict for one step of a small model on one rank."""
    found = {}
    for layer in model.layers:
        for one in list_saved_tensors(dataclasses.replace(layer, is_deterministic=is_deterministic)):
            for tag in {LOCAL_NORMS.get(one.name, tag) for tag in one.tags} - {"layer_input"}:
                found[tag] = found.get(tag, 0) + one.size_bytes
    return found


def measure(flags, tags, *, is_deterministic):
    """Return the bytes per tag that one step offloads, including storages that another tag offloaded first."""
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
def test_saved_bytes_of_each_argument_file_match_the_formulas(name, is_deterministic):
    model = shrink(name, changes=LOCAL)
    expected = predict(model, is_deterministic=is_deterministic)
    assert measure(model.flags, tuple(expected), is_deterministic=is_deterministic) == expected


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    """Return the results of all files with one layout, by name."""
    layout = request.param
    return measure_ranks(
        {name: shrink(name, layout, changes=LOCAL) for one, name in SHARED if one == layout}, layout, tmp_path_factory
    )


def measure_ranks(models, layout, tmp_path_factory):
    """Return the results of each rank and the small model, by name."""
    trainings = {
        name: {"flags": model.flags, "tags": list(predict(model, is_deterministic=False))} for name, model in models.items()
    }
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "request.json").write_text(json.dumps({"trainings": trainings, "is_deterministic": False}))
    run_processes(str(SCRIPT), folder, processes=layout.ranks, timeout_seconds=110, imports=IMPORTS)
    return {
        name: ([json.loads((folder / f"result-{rank}.json").read_text())[name] for rank in range(layout.ranks)], model)
        for name, model in models.items()
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("measured", "name"),
    # Layouts that share both layers and experts cover every formula; the others are slow tests.
    [pytest.param(layout, name, marks=() if min(layout) == 2 else pytest.mark.slow) for layout, name in SHARED],
    indirect=["measured"],
    scope="module",
    ids=str,
)
def test_saved_bytes_match_the_formulas_on_two_ranks_that_share_layers_or_experts(name, measured):
    results, model = measured[name]
    for result in results:
        assert isinstance(result, dict), result
        assert result["bytes"] == predict(model, is_deterministic=False)
        # All experts get the same number of rows: the formulas assume balanced routing.
        assert all(len(set(rows)) == 1 for rows in result["rows"])
