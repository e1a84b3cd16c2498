"""When memory may be at its peak: small schedules by hand, and steps with fewer microbatches that have the same moments."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy_ranks import make_toy_rank

from fgoffload.planner.ranks.schedule import PassKind, Pipeline, list_passes
from fgoffload.planner.solving.moments import count_backwards, list_largest, list_moments, shorten


def write(moments):
    def name(way):
        return "-" if way is None else f"{'F' if way[0] is PassKind.FORWARD else 'B'}{way[1]}"

    return {(name(moment.gap.before), name(moment.gap.after), moment.in_flight) for moment in moments}


def test_1f1b_is_fullest_behind_a_forward():
    # Rank 0 of 2 runs F0 F1 B0 F2 B1 B2: two in flight behind the forwards, and before the last backward one.
    passes = list_passes(Pipeline(stages=2, microbatches=3), rank=0)
    assert write(list_moments(passes, chunks=1)) == {("F0", "F0", (1,)), ("F0", "B0", (2,)), ("B0", "B0", (1,))}


def test_under_interleaving_the_chunks_are_full_at_different_times():
    # Rank 1 of 2 runs F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 ...: with 2 microbatches chunk 0 waits while chunk 1 comes and goes.
    passes = list_passes(Pipeline(stages=2, chunks=2, microbatches=2), rank=1)
    assert " ".join(map(str, passes)) == "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"
    assert write(list_moments(passes, chunks=2)) == {
        ("F0", "F0", (1, 0)),
        ("F0", "F1", (2, 0)),
        ("F1", "B1", (2, 1)),
        ("B1", "B0", (2, 0)),
        ("B0", "B0", (1, 0)),
    }


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=100)
def test_whatever_chunks_keep_the_largest_product_is_of_a_vector_that_is_left(vectors):
    left = list_largest(vectors)
    assert set(left) <= set(vectors)
    for a in range(6):
        for b in range(6):
            assert max(a * x + b * y for x, y in left) == max(a * x + b * y for x, y in vectors)


def test_a_line_of_vectors_has_its_ends_alone():
    assert list_largest([(4, 0), (3, 1), (2, 2), (1, 3), (0, 4)]) == [(4, 0), (0, 4)]


@pytest.mark.parametrize(
    ("stages", "chunks", "rank", "microbatches", "left"),
    [
        (1, 1, 0, 64, 3),  # one in flight, and two more
        (4, 1, 0, 64, 6),  # four in flight, and two more
        (4, 1, 3, 64, 3),
        (4, 1, 0, 4, 4),  # no more than there are
        (4, 2, 0, 64, 12),  # eight in flight in chunk 0, and the rest of the next group of four
    ],
)
def test_a_short_step_has_the_moments_of_the_whole_one_with_two_microbatches_more_than_fill_the_rank(
    stages, chunks, rank, microbatches, left
):
    pipeline = Pipeline(stages=stages, chunks=chunks, microbatches=microbatches)
    whole = make_toy_rank(layers=[[]] * chunks, pipeline=pipeline, rank=rank)
    short = shorten(whole)
    assert count_backwards(short.passes, chunk=0) == left
    assert write(list_moments(short.passes, chunks=chunks)) == write(list_moments(whole.passes, chunks=chunks))
