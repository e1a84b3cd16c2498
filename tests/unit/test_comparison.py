import pytest

from fgoffload.cli.comparison import Comparison, Difference, MemorySample, RunRecord, StepRecord


def make_step(losses=(1.0, 2.0), digests=None, seconds=0.1):
    return StepRecord(losses=losses, gradient_digests=digests or {"a": "11", "b": "22"}, seconds=seconds)


def make_run(*steps, peak_bytes=100):
    return RunRecord(steps=steps or (make_step(),), activation_peak_bytes=peak_bytes, samples=(MemorySample(0, peak_bytes),))


def test_trainings_that_computed_the_same_are_equal():
    comparison = Comparison(without=make_run(make_step(), make_step()), with_offload=make_run(make_step(), make_step()))
    assert comparison.is_equal
    assert (comparison.find_loss_difference(), comparison.find_gradient_difference()) == (None, None)


def test_a_loss_that_differs_in_the_last_bit_is_found_with_step_and_microbatch():
    other = make_step(losses=(1.0, 2.0000000000000004))
    comparison = Comparison(without=make_run(make_step(), make_step()), with_offload=make_run(make_step(), other))
    assert comparison.find_loss_difference() == Difference(step=2, what="microbatch 2")
    assert not comparison.is_equal


def test_a_zero_whose_sign_differs_is_found():
    comparison = Comparison(without=make_run(make_step(losses=(0.0,))), with_offload=make_run(make_step(losses=(-0.0,))))
    assert comparison.find_loss_difference() == Difference(step=1, what="microbatch 1")


def test_a_loss_that_is_not_a_number_in_both_is_equal():
    nan = float("nan")
    comparison = Comparison(without=make_run(make_step(losses=(nan,))), with_offload=make_run(make_step(losses=(nan,))))
    assert comparison.is_equal


def test_another_number_of_losses_is_found():
    comparison = Comparison(without=make_run(make_step(losses=(1.0,))), with_offload=make_run(make_step()))
    assert comparison.find_loss_difference() == Difference(step=1, what="1 and 2 losses")


def test_the_first_parameter_whose_gradient_differs_is_named():
    without = make_run(make_step(), make_step(digests={"a": "11", "b": "22", "c": "33"}))
    with_offload = make_run(make_step(), make_step(digests={"a": "11", "b": "2x", "c": "3x"}))
    comparison = Comparison(without=without, with_offload=with_offload)
    assert comparison.find_gradient_difference() == Difference(step=2, what="b")
    assert not comparison.is_equal


@pytest.mark.parametrize("other", [{"a": "11"}, {"a": "11", "b": "22", "c": "33"}])
def test_a_gradient_that_only_one_training_has_is_named(other):
    comparison = Comparison(without=make_run(make_step()), with_offload=make_run(make_step(digests=other)))
    assert comparison.find_gradient_difference() == Difference(step=1, what="b" if "b" not in other else "c")


def test_trainings_of_different_length_cannot_be_compared():
    with pytest.raises(ValueError, match="zip"):
        _ = Comparison(without=make_run(make_step()), with_offload=make_run(make_step(), make_step())).is_equal


def test_the_saved_part_is_that_of_the_peak():
    assert Comparison(without=make_run(peak_bytes=400), with_offload=make_run(peak_bytes=300)).saved_fraction == 0.25
    assert Comparison(without=make_run(peak_bytes=400), with_offload=make_run(peak_bytes=500)).saved_fraction == -0.25
    assert Comparison(without=make_run(peak_bytes=0), with_offload=make_run(peak_bytes=0)).saved_fraction == 0.0


def test_the_step_time_is_the_median_without_the_first_and_the_measured_step():
    run = make_run(*(make_step(seconds=seconds) for seconds in (9.0, 1.0, 5.0, 2.0, 8.0)))
    assert run.find_step_seconds() == 2.0


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_steps_have_no_step_time(count):
    assert make_run(*(make_step() for _ in range(count))).find_step_seconds() is None


def test_the_loss_of_a_step_is_the_mean_over_its_microbatches():
    assert make_step(losses=(1.0, 2.0)).loss == 1.5
