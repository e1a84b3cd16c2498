"""Compares the passes of a rank with Megatron-Core's own schedules.

Megatron's schedule functions run unchanged, in one process, for any rank of any pipeline. The tests drop sends to other ranks
and record each pass instead of running it.
"""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.versions import find_graph_field

from fgoffload.planner.ranks.schedule import Pass, PassKind, Pipeline, list_passes

schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
combined = pytest.importorskip("megatron.core.pipeline_parallel.combined_1f1b")
enums = pytest.importorskip("megatron.core.enums")
process_groups = pytest.importorskip("megatron.core.process_groups_config")
transformer = pytest.importorskip("megatron.core.transformer.transformer_config")


class Group:
    """A process group of a given size, without communication."""

    def __init__(self, size=1, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


class StubCommunicator:
    """A stub of Megatron's point-to-point communicator that sends and receives nothing."""

    def __init__(self, pipeline, rank, config):
        self.pp_group, self.config = Group(pipeline.stages, rank), config
        self.virtual_pipeline_model_parallel_size = pipeline.chunks if pipeline.chunks > 1 else None
        self.is_pp_first_stage, self.is_pp_last_stage = rank == 0, rank == pipeline.stages - 1
        self.total_stages, self.current_stage = pipeline.stages, rank  # 0.19 reads these instead of the group

    def __getattr__(self, name):
        return lambda *_, **__: None

    def send_forward_backward_recv_forward_backward(self, *_, **__):
        return None, None


def run_megatron(pipeline, rank):
    """Return the passes that Megatron's schedule for `pipeline` runs on `rank`, in order."""
    config = transformer.TransformerConfig(
        num_layers=pipeline.stages * pipeline.chunks,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline.stages,
        virtual_pipeline_model_parallel_size=pipeline.chunks if pipeline.chunks > 1 else None,
        microbatch_group_size_per_vp_stage=pipeline.group_size,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=False,
        **{find_graph_field(): []},
    )
    model = [torch.nn.Identity() for _ in range(pipeline.chunks)]
    for chunk, module in enumerate(model):
        module.config, module.chunk, module.model_type = config, chunk, enums.ModelType.encoder_or_decoder
    config.overlap_moe_expert_parallel_comm = pipeline.has_expert_overlap  # the constructor requires several ranks
    recorded, seen = [], dict.fromkeys(range(pipeline.chunks), 0)

    def forward_step(_step, _data, module, *_, **__):
        saved = types.SimpleNamespace(chunk=module.chunk, microbatch=seen[module.chunk])
        seen[module.chunk] += 1
        recorded.append(Pass(kind=PassKind.FORWARD, chunk=saved.chunk, microbatch=saved.microbatch))
        return [saved], torch.zeros((), dtype=torch.int)  # a list, like the tensors for the next stage

    def backward_step(_input, output, *_, **__):
        (saved,) = output
        recorded.append(Pass(kind=PassKind.BACKWARD, chunk=saved.chunk, microbatch=saved.microbatch))

    def both_steps(step, data, forward_model, _count, _input, _store, backward_model, backward_input, output, *_, **__):
        sent = forward_step(step, data, forward_model) if forward_model is not None else (None, None)
        if backward_model is not None:
            backward_step(backward_input, output)
        return *sent, None

    groups = process_groups.ProcessGroupCollection(
        **dict.fromkeys(("tp", "cp", "embd", "pos_embd", "dp_cp"), Group()), pp=Group(pipeline.stages, rank)
    )
    stub = StubCommunicator(pipeline, rank, config)
    arguments = {"pg_collection": groups, "p2p_communicator": stub} if pipeline.stages > 1 else {"pg_collection": groups}
    run = schedules.get_forward_backward_func(pipeline.stages, pipeline.chunks if pipeline.chunks > 1 else None)
    zeros = torch.zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "forward_step", forward_step)
        patch.setattr(schedules, "backward_step", backward_step)
        patch.setattr(combined, "combined_forward_backward_step", both_steps)
        patch.setattr(combined, "set_streams", lambda **_: None)
        # The schedules create their token count on the GPU.
        patch.setattr(torch, "zeros", lambda *args, **kwargs: zeros(*args, **{**kwargs, "device": "cpu"}))
        run(
            forward_step_func=None,
            data_iterator=[None] * pipeline.chunks,
            model=model,
            num_microbatches=pipeline.microbatches,
            seq_length=8,
            micro_batch_size=1,
            **arguments,
        )
    return tuple(recorded)


@st.composite
def pipelines(draw):
    """Return a small valid pipeline."""
    stages = draw(st.integers(1, 6))
    if stages == 1 or draw(st.booleans()):
        overlaps = stages == 1 and draw(st.booleans())
        return Pipeline(stages=stages, microbatches=draw(st.integers(1, 14)), has_expert_overlap=overlaps)
    size = draw(st.integers(stages, stages + 3))
    rest = draw(st.sampled_from((0, *range(stages, size))))
    return Pipeline(
        stages=stages,
        chunks=draw(st.integers(2, 4)),
        microbatches=draw(st.integers(1, 3)) * size + rest,
        group_size=None if size == stages else size,
        has_expert_overlap=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=50)
@given(pipeline=pipelines())
def test_passes_of_each_rank_match_megatrons_schedule(pipeline):
    for rank in range(pipeline.stages):
        assert list_passes(pipeline, rank=rank) == run_megatron(pipeline, rank)


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches", "group_size"),
    [(4, 2, 3, None), (4, 2, 6, None), (4, 2, 8, 3), (2, 2, 4, 5), (3, 2, 9, 4)],
)
def test_pipelines_that_megatron_rejects_are_rejected_too(stages, chunks, microbatches, group_size):
    with pytest.raises(ValueError, match="microbatches"):
        Pipeline(stages=stages, chunks=chunks, microbatches=microbatches, group_size=group_size)
    unchecked = types.SimpleNamespace(
        stages=stages, chunks=chunks, microbatches=microbatches, group_size=group_size, has_expert_overlap=False
    )
    with pytest.raises((ValueError, RuntimeError), match="micro-batches"):
        run_megatron(unchecked, 0)
