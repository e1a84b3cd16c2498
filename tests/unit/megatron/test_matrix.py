"""The CPU column of the matrix: each kind of layer and each parallel layout trains to the same bits with offload.

A row is one training, run without and with every tag that its model has a site for. Two processes are started once for all
rows that need them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import pytest
import torch
from support.attention import reference_attention
from support.pipeline import StageResult, Training, run_trainings, train

from fgoffload import default_tags
from fgoffload.integrations.megatron.arguments import parse_arguments
from fgoffload.integrations.megatron.data import Microbatch, TextData
from fgoffload.integrations.megatron.forward_step import ForwardStep, find_packed_bounds
from fgoffload.integrations.megatron.imports import ignore_expected_warnings
from fgoffload.integrations.megatron.site_table import SITES
from fgoffload.integrations.megatron.training import Trainer

# Forty seconds on two idle cores, most of them for the two processes, which whoever asks for them first waits for.
pytestmark = [pytest.mark.usefixtures("parallel"), pytest.mark.timeout(400)]

DENSE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 "
    "--swiglu --disable-bias-linear --lr 1e-2 --position-embedding-type rope --normalization RMSNorm "
    "--hidden-dropout 0 --attention-dropout 0"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2"
MOE = f"{DENSE} {EXPERTS}"
MIXED = f"{MOE} --moe-layer-freq [0,1]"
SHARED = "--moe-shared-expert-intermediate-size 32"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12"
PIPELINE = "--pipeline-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"

KNOWN_TAGS = [name for name in default_tags().names if any(row.tag == name and row.since == "0.16.1" for row in SITES)]
"""Those that this version of Megatron-Core has a place for."""
FULL_RECOMPUTE_TAGS = {"layer_input"}
EXPERT_TAGS = {"router", "expert_fc1", "moe_act", "expert_fc2", "moe_combine"}
DENSE_MLP_TAGS = {"mlp_fc1", "mlp_act", "mlp_fc2"}
SHARED_TAGS = {"shared_expert"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One training."""

    flags: str
    steps: int = 2
    evaluates_before: tuple[int, ...] = ()
    has_reference_attention: bool = False

    @property
    def tags(self) -> list[str]:
        """All tags but those that the model has no site for."""
        absent = FULL_RECOMPUTE_TAGS | (set() if SHARED in self.flags else SHARED_TAGS)
        if EXPERTS not in self.flags:
            absent |= EXPERT_TAGS
        elif "--moe-layer-freq" not in self.flags:
            absent |= DENSE_MLP_TAGS
        return [name for name in KNOWN_TAGS if name not in absent]

    def list_trainings(self) -> list[Training]:
        """Return the training without and with offload."""
        flags = self.flags.split()
        offload = ["--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "0", "--offload-modules", *self.tags]
        return [
            Training(
                argv=(*flags, *offload),
                steps=self.steps,
                offload=has_offload,
                evaluates_before=self.evaluates_before,
                has_reference_attention=self.has_reference_attention,
            )
            for has_offload in (False, True)
        ]


ONE_PROCESS = {
    "dense": Row(DENSE),
    "moe_top_2": Row(MOE),
    "shared_experts": Row(f"{MOE} {SHARED}"),
    "shared_experts_all_to_all": Row(f"{MOE} {SHARED} {ALL_TO_ALL} --moe-shared-expert-overlap"),
    "mixed_dense_and_moe": Row(MIXED),
    "grouped_queries": Row(f"{MIXED} --group-query-attention --num-query-groups 2"),
    "multi_token_prediction": Row(f"{MIXED} --mtp-num-layers 2"),
    "multi_token_prediction_dense": Row(f"{DENSE} --mtp-num-layers 1"),
    "latent_attention": Row(f"{MIXED} {LATENT}", has_reference_attention=True),
    "packed_sequences": Row(f"{MIXED} --packed-sequences", has_reference_attention=True),
    "packed_latent_attention": Row(f"{MIXED} {LATENT} --packed-sequences", has_reference_attention=True),
    "bf16": Row(f"{MIXED} {SHARED} --bf16"),
    "bf16_with_fp32_gradients": Row(f"{MIXED} --bf16 --accumulate-allreduce-grads-in-fp32"),
    "fp32": Row(f"{MIXED} {SHARED}"),
    "dropout": Row(f"{MIXED} --hidden-dropout 0.1 --attention-dropout 0.1"),
    "biases_layer_norm_learned_positions": Row(
        DENSE.replace("--disable-bias-linear", "").replace("rope", "learned_absolute").replace("RMSNorm", "LayerNorm")
    ),
    "expert_bias": Row(f"{MIXED} --moe-router-enable-expert-bias --moe-router-score-function sigmoid"),
    "loss_over_all_tokens": Row(f"{MIXED} --calculate-per-token-loss"),
    "lengths_that_differ": Row(f"{MIXED} {ALL_TO_ALL} --variable-seq-lengths", steps=3),
    "forward_only_first": Row(f"{MIXED} --hidden-dropout 0.1", evaluates_before=(0,)),
    "evaluation_between_steps": Row(f"{MIXED} --hidden-dropout 0.1", steps=3, evaluates_before=(1, 2)),
    "batch_that_ramps_up": Row(f"{MIXED} --rampup-batch-size 1 1 3", steps=4),
}

TWO_PROCESSES = {
    "1f1b": Row(f"{MIXED} {PIPELINE}"),
    "interleaved": Row(
        f"{DENSE} {EXPERTS} --num-layers 4 --moe-layer-freq [0,1]*2 {PIPELINE} --num-layers-per-virtual-pipeline-stage 1"
    ),
    "uneven_stages": Row(f"{MOE} --num-layers 3 --moe-layer-freq [0]*1+[1]*2 {PIPELINE} --decoder-first-pipeline-num-layers 1"),
    "fewer_microbatches_than_stages": Row(f"{MIXED} {PIPELINE} --global-batch-size 1"),
    "pipeline_with_lengths_that_differ": Row(f"{MIXED} {PIPELINE} {ALL_TO_ALL} --variable-seq-lengths"),
    "pipeline_with_evaluation": Row(f"{MIXED} {PIPELINE} --hidden-dropout 0.1", evaluates_before=(0, 1)),
    "pipeline_with_multi_token_prediction": Row(f"{MIXED} {PIPELINE} --mtp-num-layers 1"),
    "pipeline_that_ramps_up": Row(f"{MIXED} {PIPELINE} --rampup-batch-size 1 1 3", steps=3),
    "tensor_and_sequence_parallel": Row(f"{MIXED} {SHARED} {TENSOR}"),
    "tensor_parallel_experts_all_to_all": Row(f"{MIXED} {TENSOR} {ALL_TO_ALL}"),
    "tensor_and_expert_parallel": Row(
        f"{MIXED} {TENSOR} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {ALL_TO_ALL}"
    ),
    "expert_parallel_all_gather": Row(f"{MIXED} --expert-model-parallel-size 2"),
    "expert_parallel_all_to_all": Row(f"{MIXED} {SHARED} --expert-model-parallel-size 2 {ALL_TO_ALL}"),
    "data_parallel": Row(f"{MIXED} --hidden-dropout 0.1"),
    "data_parallel_bf16": Row(f"{MIXED} --bf16"),
}

FOUR_PROCESSES = {
    "pipeline_of_tensor_parallel_stages": Row(f"{MIXED} {PIPELINE} {TENSOR} {ALL_TO_ALL}"),
    "pipeline_of_expert_parallel_stages": Row(f"{MIXED} {PIPELINE} --expert-model-parallel-size 2"),
    "data_parallel_pipelines": Row(f"{MIXED} {PIPELINE}"),
}

Results = Mapping[str, list[list[StageResult]]]
"""By row: without and with offload, by rank."""


def run_rows(rows: Mapping[str, Row], *, processes: int, timeout_seconds: float) -> Results:
    trainings = [training for row in rows.values() for training in row.list_trainings()]
    found = run_trainings(trainings, processes=processes, timeout_seconds=timeout_seconds)
    return {name: found[2 * index : 2 * index + 2] for index, name in enumerate(rows)}


def check_row(row: Row, without: list[StageResult], with_offload: list[StageResult]) -> None:
    """Check that every bit of all ranks is the same, and that each tag's bytes left on some rank."""
    assert [rank.losses for rank in with_offload] == [rank.losses for rank in without]
    assert [rank.gradient_digests for rank in with_offload] == [rank.gradient_digests for rank in without]
    assert [rank.evaluations for rank in with_offload] == [rank.evaluations for rank in without]
    assert all(rank.gradient_digests[0] for rank in without)
    moved = {tag: sum(rank.transfers.get(tag, 0) for rank in with_offload) for tag in row.tags}
    assert [tag for tag, moved_bytes in moved.items() if moved_bytes == 0] == []


@pytest.fixture(scope="module")
def text() -> TextData:
    return TextData.load()


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process_computes_the_same_bits(name, text):
    row = ONE_PROCESS[name]
    without, with_offload = (train(training, text=text) for training in row.list_trainings())
    check_row(row, [without], [with_offload])
    assert all(without.losses)


@pytest.fixture(scope="module")
def two_processes() -> Results:
    return run_rows(TWO_PROCESSES, processes=2, timeout_seconds=300)


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes_compute_the_same_bits(name, two_processes):
    check_row(TWO_PROCESSES[name], *two_processes[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_processes_compute_the_same_bits():
    for name, found in run_rows(FOUR_PROCESSES, processes=4, timeout_seconds=500).items():
        check_row(FOUR_PROCESSES[name], *found)


# That the trainer itself is right where ranks share a model: what is reduced is the same on all, what is not differs.


def find_equal(ranks: list[StageResult]) -> Collection[str]:
    """Return the parameters whose gradients were equal on two ranks in every step."""
    steps = list(zip(*(rank.gradient_digests for rank in ranks), strict=True))
    return {name for name in steps[0][0] if all(first[name] == second[name] for first, second in steps)}


@pytest.mark.parametrize("name", ["data_parallel", "data_parallel_bf16"])
def test_copies_of_the_model_see_other_text_and_have_the_same_gradients(name, two_processes):
    ranks, _ = two_processes[name]
    assert ranks[0].losses[0] != ranks[1].losses[0]
    assert [len(losses) for losses in ranks[0].losses] == [2, 2]  # half of the global batch
    assert find_equal(ranks) == set(ranks[0].gradient_digests[0])


@pytest.mark.parametrize("name", ["expert_parallel_all_gather", "expert_parallel_all_to_all"])
def test_only_the_experts_of_expert_parallel_ranks_differ(name, two_processes):
    ranks, _ = two_processes[name]
    names = set(ranks[0].gradient_digests[0])
    assert ranks[0].losses[0] != ranks[1].losses[0]
    assert names - find_equal(ranks) == {name for name in names if ".experts.local_experts." in name}
    assert len([name for name in names if ".experts.local_experts." in name]) == 2 * 2  # experts, linears


def test_evaluation_changes_no_bit_of_the_training(text):
    with_evaluation = ONE_PROCESS["evaluation_between_steps"]
    alone = dataclasses.replace(with_evaluation, evaluates_before=())
    expected, found = (train(row.list_trainings()[0], text=text) for row in (alone, with_evaluation))
    assert (found.losses, found.gradient_digests) == (expected.losses, expected.gradient_digests)
    assert [len(losses) for losses in found.evaluations] == [4, 4]
    # The first evaluation sees text that no step has seen, and the model has learned something by then.
    assert sum(found.evaluations[0]) / 4 < sum(found.losses[0]) / 4


def test_sequences_packed_into_one_do_not_see_each_other(text):
    arguments = parse_arguments(f"{DENSE} --packed-sequences".split(), source="test")
    bounds = find_packed_bounds(32)
    assert bounds == [0, 16, 24, 32]
    tokens = torch.arange(32)[None]
    other = tokens.clone()
    other[0, :16] = 99
    with reference_attention():
        trainer = Trainer(arguments, text, offload=None)
        try:
            step = ForwardStep(arguments, torch.device("cpu"))
            losses = []
            for batch in (tokens, other):
                microbatch = Microbatch(batch, tokens, torch.ones(1, 32), tokens)
                with ignore_expected_warnings(), torch.no_grad():
                    losses.append(step(iter([microbatch]), trainer.chunks[0])[0])
        finally:
            trainer.close()
    assert torch.equal(losses[0][0, 16:], losses[1][0, 16:])
    assert not torch.equal(losses[0][0, :16], losses[1][0, :16])
