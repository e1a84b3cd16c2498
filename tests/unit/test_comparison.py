from fgoffload.benchmark.steps import Difference, StepRecord
from fgoffload.cli.comparison import (
    Comparison,
    MemorySample,
    RunRecord,
    merge_ranks,
)


def make_step(losses=(1.0, 2.0), digests=None, seconds=0.1):
    return StepRecord(losses=losses, gradient_digests=digests or {"a": "11", "b": "22"}, seconds=seconds)


def make_run(*steps, peak_bytes=100):
    return RunRecord(steps=steps or (make_step(),), activation_peak_bytes=peak_bytes, samples=(MemorySample(0, peak_bytes),))


def test_a_loss_that_differs_in_the_last_bit_is_found_with_step_and_microbatch():
    other = make_step(losses=(1.0, 2.0000000000000004))
    comparison = Comparison(without=make_run(make_step(), make_step()), with_offload=make_run(make_step(), other))
    assert comparison.find_loss_difference() == Difference(step=2, what="microbatch 2")
    assert not comparison.is_equal


def test_the_first_parameter_whose_gradient_differs_is_named():
    without = make_run(make_step(), make_step(digests={"a": "11", "b": "22", "c": "33"}))
    with_offload = make_run(make_step(), make_step(digests={"a": "11", "b": "2x", "c": "3x"}))
    comparison = Comparison(without=without, with_offload=with_offload)
    assert comparison.find_gradient_difference() == Difference(step=2, what="b")
    assert not comparison.is_equal


def make_rank(losses, digests, *, peak_bytes, seconds=0.1, place="", transfers=None, allocator=None):
    return RunRecord(
        steps=(make_step(losses=losses, digests=digests, seconds=seconds),),
        activation_peak_bytes=peak_bytes,
        samples=(MemorySample(0, peak_bytes),),
        activation_peak_place=place,
        allocator_peak_bytes=allocator,
        transfers=transfers,
    )


def test_all_ranks_together_have_every_result_and_the_worst_of_memory_and_time():
    merged = merge_ranks(
        [
            make_rank((), {"a": "1"}, peak_bytes=10, seconds=3.0, allocator=7),
            make_rank((1.0, 2.0), {"a": "2", "b": "3"}, peak_bytes=30, place="layers.1.core_attn mb=0", allocator=5),
            make_rank((4.0,), {"a": "4"}, peak_bytes=20),
        ]
    )
    (step,) = merged.steps
    assert step.losses == (1.0, 2.0, 4.0)
    assert [step.name_loss(index) for index in range(3)] == [
        "microbatch 1 of rank 1",
        "microbatch 2 of rank 1",
        "microbatch 1 of rank 2",
    ]
    assert step.gradient_digests == {
        "a of rank 0": "1",
        "a of rank 1": "2",
        "b of rank 1": "3",
        "a of rank 2": "4",
    }
    assert step.seconds == 3.0
    assert (merged.activation_peak_bytes, merged.samples) == (30, (MemorySample(0, 30),))
    assert merged.activation_peak_place == "layers.1.core_attn mb=0 of rank 1"
    assert (merged.allocator_peak_bytes, merged.transfers, merged.ranks) == (7, None, 3)
