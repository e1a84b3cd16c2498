"""Compares the static memory of a rank with sums by hand, for public models.

tests/unit/megatron/test_parameters.py compares the parameters of each rank with those that Megatron builds.
"""

import dataclasses

import pytest
from support.public_models import LLAMA_8B

from fgoffload import ConfigError
from fgoffload.planner.memory.static_memory import ParameterState, count_output_bytes, list_static_memory
from fgoffload.planner.model.layer_shape import ExpertsShape
from fgoffload.planner.model.parallelism import Parallelism

MIXTRAL = dataclasses.replace(
    LLAMA_8B,
    name="Mixtral 8x7B",
    vocab_size=32000,
    ffn_hidden_size=0,
    experts=ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=14336),
)


def test_a_single_rank_needs_18_bytes_per_parameter():
    found = list_static_memory(LLAMA_8B, Parallelism(has_distributed_optimizer=False), 0)
    assert found.weight_bytes == 2 * 8_030_261_248
    assert found.gradient_bytes == 4 * 8_030_261_248
    assert found.optimizer_bytes == 12 * 8_030_261_248
    assert found.allocated_bytes == 18 * 8_030_261_248 + found.workspace_bytes == found.total_bytes - found.reserve_bytes


def test_the_distributed_optimizer_shards_over_data_and_context_parallel_ranks():
    parallelism = Parallelism(data_parallel_size=4, context_parallel_size=2)
    found = list_static_memory(LLAMA_8B, parallelism, 0)
    assert found.optimizer_bytes == 12 * 8_030_261_248 // 8
    assert found.gradient_bytes == 4 * 8_030_261_248
    alone = dataclasses.replace(parallelism, has_distributed_optimizer=False)
    assert list_static_memory(LLAMA_8B, alone, 0).optimizer_bytes == 12 * 8_030_261_248


def test_two_layers_of_sharded_weights_are_gathered_and_fp8_weights_replace_bf16():
    eight, count = Parallelism(data_parallel_size=8), 8_030_261_248
    state = ParameterState(shards_gradients=True, shards_weights=True, offloaded_part=0.5)
    found, whole = list_static_memory(LLAMA_8B, eight, 0, state=state), count // 8 + count // 16
    assert (found.weight_bytes, found.gradient_bytes, found.optimizer_bytes) == (2 * whole, 4 * whole, 6 * count // 8)
    linear = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    fp8 = dataclasses.replace(LLAMA_8B, fp8_recipe="tensorwise")
    found = list_static_memory(fp8, eight, 0, state=ParameterState(has_fp8_weights=True))
    assert (found.weight_bytes, found.fp8_weight_bytes) == (2 * (count - linear), 2 * linear)


def test_expert_optimizer_state_shards_over_fewer_ranks():
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = 46_702_792_704 - experts
    parallelism = Parallelism(data_parallel_size=8, expert_parallel_size=4)
    found = list_static_memory(MIXTRAL, parallelism, 0)
    assert found.weight_bytes == 2 * (dense + experts // 4)
    assert found.optimizer_bytes == 12 * (dense // 8 + experts // 4 // 2)


@pytest.mark.parametrize(("recipe", "scale_bytes"), [(None, None), ("delayed", 0), ("blockwise", 4 / 16384)])
def test_linear_weights_have_two_fp8_copies(recipe, scale_bytes):
    linear = 32 * (4096 * 48 * 128 + 4096 * 4096 + 3 * 4096 * 14336)
    found = list_static_memory(dataclasses.replace(LLAMA_8B, fp8_recipe=recipe), Parallelism(), 0)
    assert found.fp8_weight_bytes == (0 if recipe is None else 2 * linear * (1 + scale_bytes))
    assert found.weight_bytes == 2 * 8_030_261_248


def test_fractional_bytes_per_parameter_are_rejected():
    with pytest.raises(ConfigError, match=r"moment_bytes 0.5 is not a whole number\. Use an int\."):
        ParameterState(moment_bytes=0.5)


def test_saved_bytes_of_megatrons_cross_entropy_match_the_formula():
    torch = pytest.importorskip("torch")
    cross_entropy = pytest.importorskip("megatron.core.tensor_parallel.cross_entropy")
    model = dataclasses.replace(LLAMA_8B, vocab_size=256, seq_length=24, hidden_size=64)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        # One rank has the whole vocabulary and needs no communication.
        patch.setattr(cross_entropy, "get_tensor_model_parallel_group", lambda: None)
        if hasattr(cross_entropy, "get_tensor_model_parallel_rank"):  # newer versions read the group, and None is a single rank
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


def test_sequence_parallel_ranks_allocate_a_buffer_for_the_gathered_sequence():
    parallelism = Parallelism(tensor_parallel_size=4, has_distributed_optimizer=False)
    found = list_static_memory(LLAMA_8B, parallelism, 0)
    assert found.gather_buffer_bytes == 2 * 8192 * 4096
    whole = list_static_memory(LLAMA_8B, dataclasses.replace(parallelism, has_sequence_parallel=False), 0)
    assert whole == dataclasses.replace(found, gather_buffer_bytes=0)
