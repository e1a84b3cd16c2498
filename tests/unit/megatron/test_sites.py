"""Tests every tag with a site in Megatron-Core's local layers: bitwise identical results and exact bytes."""

import pytest
import torch
from support.trainings import (
    ATTENTION_TAGS,
    DENSE,
    EXPERT_TAGS,
    HIDDEN_BYTES,
    MIXED,
    MIXED_TAGS,
    MLP_TAGS,
    MOE,
    SHARED,
    TOKENS,
    make_config,
    make_trainer,
    train,
)
from support.versions import RECOMPUTES_DEPTHS, is_installed

from fgoffload import IntegrationError

pytestmark = pytest.mark.usefixtures("parallel")

CHUNKS = pytest.mark.skipif(not is_installed("0.18"), reason="MLP chunks need megatron-core 0.18 or newer")
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
OVERLAP = "--moe-token-dispatcher-type alltoall --moe-shared-expert-overlap"


@pytest.mark.parametrize(
    ("flags", "tags"),
    [
        *((DENSE, (tag,)) for tag in MLP_TAGS),
        (DENSE, MLP_TAGS),
        *((SHARED, (tag,)) for tag in ("router", "shared_expert", "expert_fc2", "moe_combine")),
        (MIXED, MIXED_TAGS),
        (f"{MIXED} --bf16", MIXED_TAGS),
        (f"{SHARED} {OVERLAP}", ("shared_expert",)),
        (f"{SHARED} {OVERLAP} --moe-shared-expert-gate", (*ATTENTION_TAGS, "shared_expert", *EXPERT_TAGS)),
        (f"{MOE} {FULL} uniform", ("layer_input",)),
        (f"{MIXED} {FULL} block", ("layer_input", *(tag for tag in MIXED_TAGS if tag not in MLP_TAGS))),
        (f"{MIXED} --mtp-num-layers 1", MIXED_TAGS),
        pytest.param(f"{MIXED} --mlp-chunks-for-training 2", MIXED_TAGS, marks=CHUNKS),
        pytest.param(f"{MIXED} --mtp-num-layers 1 {FULL} uniform", ("layer_input",), marks=RECOMPUTES_DEPTHS),
    ],
)
def test_losses_and_gradients_are_bitwise_identical(flags, tags):
    expected, _ = train(flags)
    found, offloaded_bytes = train(flags, make_config(*tags))
    assert found == expected
    assert set(offloaded_bytes) == set(tags)
    # attn_proj saves the same storage as core_attn, which is offloaded first.
    assert all(size_bytes > 0 for tag, size_bytes in offloaded_bytes.items() if tag != "attn_proj")


@pytest.mark.parametrize(("method", "layers"), [("uniform", 2), ("block", 1)])
def test_full_recompute_offloads_the_checkpointed_layer_inputs(method, layers):
    flags = f"{DENSE} --recompute-granularity full --recompute-method {method} --recompute-num-layers 1".replace(
        "--position-embedding-type rope", "--position-embedding-type learned_absolute"
    )
    _, offloaded_bytes = train(flags, make_config("layer_input", min_offloaded_tensor_size=TOKENS * 32))
    assert offloaded_bytes == {"layer_input": HIDDEN_BYTES * layers * 2}


def test_a_layer_input_without_full_recompute_has_no_site():
    with (
        make_trainer(DENSE, make_config("layer_input")) as trainer,
        pytest.raises(IntegrationError, match="'layer_input' has no site in this model on any rank"),
    ):
        trainer.run_step()


def test_combine_offloads_the_expert_output_that_unpermute_saves():
    # With deterministic algorithms it uses index_add, which saves the added tensor.
    _, offloaded_bytes = train(MOE, make_config("moe_combine", min_offloaded_tensor_size=4096))
    assert offloaded_bytes == {"moe_combine": 2 * HIDDEN_BYTES * 2 * 2}  # top-2, two layers, two microbatches


def test_combine_warns_if_unpermute_saves_only_an_index(caplog):
    with make_trainer(MOE, make_config("moe_combine", min_offloaded_tensor_size=4096)) as trainer:
        torch.use_deterministic_algorithms(mode=False)
        trainer.run_step()
    assert "--offload-modules moe_combine offloaded nothing in the first step" in caplog.text


def test_an_offload_fraction_includes_multi_token_prediction_layers():
    config = make_config("core_attn", activation_offload_fraction=0.7)
    with make_trainer(f"{MIXED} --mtp-num-layers 1", config) as trainer:
        trainer.run_step()
        assert trainer.integration.last_step.tags["core_attn"].groups == 2 * 2  # two of three layers, two microbatches
