"""Parameters of public models against the numbers that are published, and what a rank's device holds against sums by hand.

That each rank has the parameters that Megatron builds there is in tests/unit/megatron/test_parameters.py.
"""

import dataclasses

import pytest
from support.public_models import DEEPSEEK_V3, LLAMA_8B

from fgoffload import ConfigError
from fgoffload.planner.memory.static_memory import (
    DEFAULT_RESERVE_BYTES,
    DEFAULT_WORKSPACE_BYTES,
    NO_OPTIMIZER,
    ParameterState,
    StaticMemory,
    count_output_bytes,
    count_parameters,
    list_static_memory,
)
from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.parallelism import Parallelism

MIXTRAL = dataclasses.replace(
    LLAMA_8B,
    name="Mixtral 8x7B",
    vocab_size=32000,
    ffn_hidden_size=0,
    experts=ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=14336),
)


@pytest.mark.parametrize(
    ("model", "published"),
    [(LLAMA_8B, 8_030_261_248), (MIXTRAL, 46_702_792_704)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_public_model_has_the_parameters_of_its_checkpoint(model, published):
    assert count_parameters(model) == published


def test_each_term_of_a_latent_model_is_counted():
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168 + 1536 + 512
    norms = 2 * 7168
    dense = 3 * 7168 * 18432
    mixture = 7168 * 256 + (256 + 1) * 3 * 7168 * 2048
    ends = 2 * 129280 * 7168 + 7168
    assert count_parameters(DEEPSEEK_V3) == 61 * (attention + norms) + 3 * dense + 58 * mixture + ends
    # With multi-token prediction: a layer more, three norms, and a projection of twice the channels.
    predicting = dataclasses.replace(DEEPSEEK_V3, mtp_num_layers=1)
    added = attention + norms + mixture + 3 * 7168 + 2 * 7168 * 7168
    assert count_parameters(predicting) == count_parameters(DEEPSEEK_V3) + added
    # A query in one go has a norm of the hidden states.
    whole = dataclasses.replace(DEEPSEEK_V3, latent=dataclasses.replace(DEEPSEEK_V3.latent, q_lora_rank=None))
    added = 7168 * 128 * 192 + 7168 - (7168 * 1536 + 1536 * 128 * 192 + 1536)
    assert count_parameters(whole) == count_parameters(DEEPSEEK_V3) + 61 * added


# What a rank holds.

NOTHING_ELSE = {"workspace_bytes": 0, "reserve_bytes": 0}
TENSOR = 32 * (4096 * 48 * 128 + 4096 * 4096 + 3 * 4096 * 14336) + 2 * 128256 * 4096
WHOLE = (2 * 32 + 1) * 4096


def test_one_rank_without_any_sharing_holds_18_bytes_a_parameter():
    found = list_static_memory(LLAMA_8B, Parallelism(has_distributed_optimizer=False), 0, **NOTHING_ELSE)
    assert found.weight_bytes == 2 * 8_030_261_248
    assert found.gradient_bytes == 4 * 8_030_261_248
    assert found.optimizer_bytes == 12 * 8_030_261_248
    assert found.total_bytes == found.allocated_bytes == 18 * 8_030_261_248


def test_tensor_parallel_ranks_share_all_but_the_norms():
    parallelism = Parallelism(tensor_parallel_size=4, has_distributed_optimizer=False)
    found = list_static_memory(LLAMA_8B, parallelism, 0, **NOTHING_ELSE)
    assert found.weight_bytes == 2 * (TENSOR // 4 + WHOLE)
    # The output layer gathers hidden states of the whole sequence, in a buffer that stays.
    assert found.gather_buffer_bytes == 2 * 8192 * 4096
    assert found.total_bytes == 18 * (TENSOR // 4 + WHOLE) + 2 * 8192 * 4096
    # Nothing is gathered where each has the whole sequence.
    whole = list_static_memory(LLAMA_8B, dataclasses.replace(parallelism, has_sequence_parallel=False), 0, **NOTHING_ELSE)
    assert whole == dataclasses.replace(found, gather_buffer_bytes=0)


def test_the_distributed_optimizer_is_shared_over_data_and_context_parallel_ranks():
    parallelism = Parallelism(data_parallel_size=4, context_parallel_size=2)
    found = list_static_memory(LLAMA_8B, parallelism, 0)
    assert found.optimizer_bytes == 12 * 8_030_261_248 // 8
    assert found.gradient_bytes == 4 * 8_030_261_248
    alone = dataclasses.replace(parallelism, has_distributed_optimizer=False)
    assert list_static_memory(LLAMA_8B, alone, 0).optimizer_bytes == 12 * 8_030_261_248


def test_experts_have_fewer_copies_to_share_their_optimizer():
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = 46_702_792_704 - experts
    parallelism = Parallelism(data_parallel_size=8, expert_parallel_size=4)
    found = list_static_memory(MIXTRAL, parallelism, 0)
    assert found.weight_bytes == 2 * (dense + experts // 4)
    assert found.optimizer_bytes == 12 * (dense // 8 + experts // 4 // 2)


def test_the_ends_of_a_pipeline_have_the_embeddings():
    layer = 4096 * 48 * 128 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    table = 128256 * 4096
    parallelism = Parallelism(pipeline_parallel_size=4, microbatches=4)
    expected = [8 * layer + table, 8 * layer, 8 * layer, 8 * layer + table + 4096]
    for model in (LLAMA_8B, dataclasses.replace(LLAMA_8B, has_tied_embeddings=True)):
        found = [list_static_memory(model, parallelism, rank).weight_bytes for rank in range(4)]
        assert found == [2 * count for count in expected]


@pytest.mark.parametrize(
    ("state", "gradient_bytes", "optimizer_bytes"),
    [
        (NO_OPTIMIZER, 4, 0),
        (ParameterState(gradient_bytes=2), 2, 12),
        (ParameterState(main_parameter_bytes=2, moment_bytes=4), 4, 6),
    ],
)
def test_gradients_and_optimizers_of_other_types(state, gradient_bytes, optimizer_bytes):
    found = list_static_memory(LLAMA_8B, Parallelism(), 0, state=state)
    assert found.gradient_bytes == gradient_bytes * 8_030_261_248
    assert found.optimizer_bytes == optimizer_bytes * 8_030_261_248


@pytest.mark.parametrize(
    ("recipe", "scale_bytes"),
    [(None, None), ("delayed", 0), ("blockwise", 4 / 16384)],
)
def test_linear_weights_have_two_copies_in_fp8(recipe, scale_bytes):
    linear = 32 * (4096 * 48 * 128 + 4096 * 4096 + 3 * 4096 * 14336)
    found = list_static_memory(dataclasses.replace(LLAMA_8B, fp8_recipe=recipe), Parallelism(), 0)
    assert found.fp8_weight_bytes == (0 if recipe is None else 2 * linear * (1 + scale_bytes))
    assert found.weight_bytes == 2 * 8_030_261_248


def test_what_the_training_does_not_allocate_is_in_the_total_alone():
    found = list_static_memory(LLAMA_8B, Parallelism(), 0, dispatch_buffer_bytes=100)
    assert found.reserve_bytes == DEFAULT_RESERVE_BYTES
    assert found.workspace_bytes == DEFAULT_WORKSPACE_BYTES
    assert found.allocated_bytes == 18 * 8_030_261_248 + 100 + DEFAULT_WORKSPACE_BYTES
    assert found.total_bytes == found.allocated_bytes + DEFAULT_RESERVE_BYTES
    few = StaticMemory(weight_bytes=1, gradient_bytes=2, optimizer_bytes=4, workspace_bytes=8, reserve_bytes=16)
    assert (few.allocated_bytes, few.total_bytes) == (15, 31)


@pytest.mark.parametrize("name", ["reserve_bytes", "workspace_bytes", "dispatch_buffer_bytes"])
def test_sizes_below_0_are_refused(name):
    with pytest.raises(ConfigError, match=rf"{name} -1 is below 0\. Give 0 or more\."):
        list_static_memory(LLAMA_8B, Parallelism(), 0, **{name: -1})
    with pytest.raises(ConfigError, match=r"moment_bytes 0.5 is no whole number\. Give an int\."):
        ParameterState(moment_bytes=0.5)


# The loss. Two sequences of 8192 tokens, a vocabulary of 128256.

LOGITS = 2 * 8192 * 128256


def test_the_loss_keeps_its_softmax_and_backward_needs_it_in_bf16_too():
    found = count_output_bytes(LLAMA_8B, Parallelism(micro_batch_size=2))
    tokens = 2 * 8192
    hidden = 2 * tokens * 4096
    # The last norm's input and statistics, its output, the softmax, and 9 bytes for each token's own logit.
    assert found.saved_bytes == hidden + 4 * tokens + hidden + 4 * LOGITS + 9 * tokens
    assert found.forward_extra_bytes == 2 * LOGITS
    assert found.backward_extra_bytes == 2 * LOGITS + hidden


def test_the_cross_entropy_of_megatron_saves_what_the_formula_says():
    torch = pytest.importorskip("torch")
    cross_entropy = pytest.importorskip("megatron.core.tensor_parallel.cross_entropy")
    model = dataclasses.replace(LLAMA_8B, vocab_size=256, seq_length=24, hidden_size=64)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        # One rank has the whole vocabulary, and nothing to ask of others.
        patch.setattr(cross_entropy, "get_tensor_model_parallel_group", lambda: None)
        if hasattr(cross_entropy, "get_tensor_model_parallel_rank"):  # newer versions ask the group, and take None for one rank
            patch.setattr(cross_entropy, "get_tensor_model_parallel_rank", lambda: 0)
            patch.setattr(cross_entropy, "get_tensor_model_parallel_world_size", lambda: 1)
        patch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        logits = torch.rand(24, 3, 256, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = cross_entropy.vocab_parallel_cross_entropy(logits, torch.randint(256, (24, 3)))
    loss.sum().backward()
    assert logits.grad.dtype is torch.bfloat16
    found = count_output_bytes(model, Parallelism(micro_batch_size=3))
    norm_and_input = 2 * 2 * 72 * 64 + 4 * 72
    assert sum(storage.nbytes() for storage in saved.values()) == found.saved_bytes - norm_and_input


# A model that was measured: docs/reference/tested.md, 4 microbatches on one stage, and no optimizer.
