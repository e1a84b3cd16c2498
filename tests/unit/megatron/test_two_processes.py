"""Trains each parallel layout with and without offload, and compares bitwise. Several runs share the same processes.

In slow tests each rank is a fresh interpreter, with its own string hashes and thus its own order of sets.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
from support.matrix import ALL_TO_ALL, DENSE, EXPERTS, MIXED, MOE, SHARED, Row, check_row
from support.pipeline import IMPORTS, StageResult, Training, run_trainings
from support.trainings import ATTENTION_TAGS
from support.trainings import MOE as LARGER_MOE

# The first test that uses the processes waits for their import of Megatron.
pytestmark = pytest.mark.timeout(400)

PIPELINE = "--pipeline-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
INTERLEAVED = "--num-layers 4 --moe-layer-freq [0,1]*2 --num-layers-per-virtual-pipeline-stage 1"

PIPELINE_ROWS = {
    "1f1b_with_variable_lengths": Row(f"{MIXED} {PIPELINE} {ALL_TO_ALL} --variable-seq-lengths"),
    "interleaved": Row(f"{DENSE} {EXPERTS} {PIPELINE} {INTERLEAVED}"),
}
PARALLEL_ROWS = {
    "tensor_and_sequence_parallel": Row(f"{MIXED} {SHARED} {TENSOR}"),
    "expert_parallel_all_to_all": Row(f"{MIXED} {SHARED} --expert-model-parallel-size 2 {ALL_TO_ALL}"),
    "data_parallel": Row(f"{MIXED} --hidden-dropout 0.1"),
}
SLOW_ROWS = {
    "1f1b_with_evaluation": Row(f"{MIXED} {PIPELINE} --hidden-dropout 0.1", evaluates_before=(0, 1)),
    "uneven_stages": Row(f"{MOE} --num-layers 3 --moe-layer-freq [0]*1+[1]*2 {PIPELINE} --decoder-first-pipeline-num-layers 1"),
    "fewer_microbatches_than_stages": Row(f"{MIXED} {PIPELINE} --global-batch-size 1"),
    "pipeline_with_multi_token_prediction": Row(f"{MIXED} {PIPELINE} --mtp-num-layers 1"),
    "pipeline_with_batch_ramp_up": Row(f"{MIXED} {PIPELINE} --rampup-batch-size 1 1 3", steps=3),
    "tensor_parallel_experts_all_to_all": Row(f"{MIXED} {TENSOR} {ALL_TO_ALL}"),
    "tensor_and_expert_parallel": Row(
        f"{MIXED} {TENSOR} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {ALL_TO_ALL}"
    ),
    "expert_parallel_all_gather": Row(f"{MIXED} --expert-model-parallel-size 2"),
    "data_parallel_bf16": Row(f"{MIXED} --bf16"),
}
FOUR_PROCESSES = {
    "pipeline_of_tensor_parallel_stages": Row(f"{MIXED} {PIPELINE} {TENSOR} {ALL_TO_ALL}"),
    "pipeline_of_expert_parallel_stages": Row(f"{MIXED} {PIPELINE} --expert-model-parallel-size 2"),
    "data_parallel_pipelines": Row(f"{MIXED} {PIPELINE}"),
}

Results = Mapping[str, list[list[StageResult]]]
"""By training: results by rank, for the baseline and for each variant."""


def run_all(trainings: Mapping[str, list[Training]], *, processes: int, imports: Sequence[str] = ()) -> Results:
    requests = [one for group in trainings.values() for one in group]
    found = iter(run_trainings(requests, processes=processes, timeout_seconds=300, imports=imports))
    return {name: [next(found) for _ in group] for name, group in trainings.items()}


def list_rows(rows: Mapping[str, Row]) -> dict[str, list[Training]]:
    return {name: row.list_trainings() for name, row in rows.items()}


@pytest.fixture(scope="module")
def parallel() -> Results:
    return run_all(list_rows(PARALLEL_ROWS), processes=2, imports=IMPORTS)


@pytest.fixture(scope="module")
def pipelines() -> Results:
    return run_all(list_rows(PIPELINE_ROWS) | {"balance": BALANCE}, processes=2, imports=IMPORTS)


@pytest.mark.parametrize("name", PIPELINE_ROWS)
def test_two_pipeline_stages_are_bitwise_identical_with_offload(name, pipelines):
    check_row(PIPELINE_ROWS[name], *pipelines[name])


@pytest.mark.parametrize("name", ["interleaved", "balance"])
def test_from_the_second_step_on_reloads_start_before_each_backward(name, pipelines):
    unknown, known = pipelines[name][1][0].prefetch_misses
    assert unknown > known == 0


@pytest.mark.parametrize("name", PARALLEL_ROWS)
def test_two_ranks_that_share_layers_are_bitwise_identical_with_offload(name, parallel):
    check_row(PARALLEL_ROWS[name], *parallel[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("group", "processes"), [(SLOW_ROWS, 2), (FOUR_PROCESSES, 4)], ids=["two", "four"])
def test_more_layouts_are_bitwise_identical_with_offload(group, processes):
    for name, results in run_all(list_rows(group), processes=processes).items():
        check_row(group[name], *results)


# Gradients of shared parameters are equal on all ranks; other gradients differ.


def find_equal(ranks: list[StageResult]) -> set[str]:
    """Return the parameters whose gradients were equal on two ranks in every step."""
    steps = list(zip(*(rank.gradient_digests for rank in ranks), strict=True))
    return {name for name in steps[0][0] if all(first[name] == second[name] for first, second in steps)}


def test_only_gradients_of_shared_parameters_agree_across_ranks(parallel):
    first, second = parallel["data_parallel"][0]
    assert first.losses[0] != second.losses[0]
    assert [len(losses) for losses in first.losses] == [2, 2]  # half of the global batch
    assert find_equal([first, second]) == set(first.gradient_digests[0])

    first, second = parallel["expert_parallel_all_to_all"][0]
    names = set(first.gradient_digests[0])
    assert first.losses[0] != second.losses[0]
    assert names - find_equal([first, second]) == {name for name in names if ".experts.local_experts." in name}

    first, second = parallel["tensor_and_sequence_parallel"][0]
    assert first.losses == second.losses
    assert find_equal([first, second]) == {name for name in first.gradient_digests[0] if "norm" in name or "router" in name}


# Settings that affect all ranks together.

OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
STAGES = f"{LARGER_MOE} --num-layers 4 --global-batch-size 8 {PIPELINE} --untie-embeddings-and-output-weights"
BUDGETS = {
    "1F1B": f"{STAGES} --offload-memory-budget 1400KiB",
    "interleaved": f"{STAGES} --num-layers-per-virtual-pipeline-stage 1 --offload-memory-budget 1500KiB",
    "expert parallel": f"{LARGER_MOE} --global-batch-size 8 --expert-model-parallel-size 2 --offload-memory-budget 700KiB",
}
AUTO = f"{OFFLOAD} auto --min-offloaded-tensor-size 16 --offload-window 16KiB --offload-prefetch 16KiB"
DELTA_BYTES = 200 * 1024


def list_variants(flags: str, *more: str, steps: int) -> list[Training]:
    """Return a baseline, the same training with offload, and one with offload and each of `more` flags."""
    baseline = Training(tuple(flags.split()), steps=steps, sets_weights=True)
    with_offload = dataclasses.replace(baseline, offload=True)
    return [baseline, with_offload, *(dataclasses.replace(with_offload, argv=(*baseline.argv, *one.split())) for one in more)]


BALANCE = list_variants(
    f"{STAGES} --min-offloaded-tensor-size 64 {OFFLOAD} {' '.join(ATTENTION_TAGS)}",
    f"--delta-offload-bytes-across-pp-ranks {DELTA_BYTES}",
    steps=2,
)


def check_results(results: list[list[StageResult]]) -> None:
    expected, *variants = ([(rank.losses, rank.gradient_digests) for rank in ranks] for ranks in results)
    assert all(variant == expected for variant in variants)


def test_each_pipeline_rank_offloads_less_than_the_previous_one(pipelines):
    check_results(pipelines["balance"])
    _, unbalanced, balanced = pipelines["balance"]
    first, second = (
        sum(one.transfers.values()) - sum(other.transfers.values()) for one, other in zip(unbalanced, balanced, strict=True)
    )
    assert first == 0
    largest_site = max(unbalanced[1].transfers.values()) // 2  # two layers
    assert DELTA_BYTES <= second < DELTA_BYTES + largest_site


@pytest.mark.slow
def test_auto_plans_across_processes_and_is_bitwise_identical():
    trainings = {name: list_variants(f"{flags} {AUTO}", steps=3) for name, flags in BUDGETS.items()}
    for results in run_all(trainings, processes=2).values():
        check_results(results)
        # The first stage has two microbatches in flight, so it needs the most memory.
        assert sum(results[1][0].transfers.values()) > 0
