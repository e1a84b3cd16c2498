"""Tests hybrid models with layer stacks in multi-token prediction: bitwise identical, with separate sites per layer."""

import pytest
from support.hybrid_models import hybrid_models
from support.trainings import DENSE, HIDDEN_BYTES, make_config, make_trainer, train
from support.versions import RECOMPUTES_DEPTHS

from fgoffload import Site

pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="hybrid models need megatron-core 0.18 or newer")
pytestmark = [
    pytest.mark.usefixtures("parallel"),
    pytest.mark.filterwarnings("ignore:recompute_method == 'block' is not supported for MTP:UserWarning"),
]

PATTERN = "*-/*-/*-"
FLAGS = f"{DENSE} --mtp-num-layers 2"
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
INPUT = ("layer_input",)
# Each checkpoint wraps a whole depth, or the first layer of a stack.
FULL_UNIFORM = f"{FLAGS} {FULL} uniform", INPUT, [(layer, *INPUT) for layer in (0, 1, 2, 4)]
FULL_BLOCK = f"{FLAGS} {FULL} block", INPUT, [(layer, *INPUT) for layer in (0, 2, 4)]


@pytest.mark.parametrize(
    ("flags", "tags", "sites"),
    [
        (FLAGS, ("core_attn", "mlp_fc1"), [(layer, "mlp_fc1" if layer % 2 else "core_attn") for layer in range(6)]),
        pytest.param(*FULL_UNIFORM, marks=RECOMPUTES_DEPTHS),
        pytest.param(*FULL_BLOCK, marks=RECOMPUTES_DEPTHS),
    ],
)
def test_every_layer_of_each_mtp_depth_has_its_own_sites(flags, tags, sites):
    with hybrid_models(PATTERN):
        expected, _ = train(flags)
        with make_trainer(flags, make_config(*tags)) as trainer:
            found = [trainer.run_step() for _ in range(2)]
            assert trainer.integration.list_sites() == [Site(chunk=0, layer=layer, tag=tag) for layer, tag in sites]
    assert [(result.losses, result.gradient_digests) for result in found] == expected


@RECOMPUTES_DEPTHS
def test_checkpointed_mtp_depths_offload_hidden_states_and_embeddings():
    with hybrid_models(PATTERN):
        _, found = train(f"{FLAGS} {FULL} uniform", make_config("layer_input", min_offloaded_tensor_size=HIDDEN_BYTES // 4))
    assert found == {"layer_input": (2 + 2 * 2) * HIDDEN_BYTES * 2}  # two layers, two depths, and microbatches
