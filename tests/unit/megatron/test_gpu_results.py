"""What the GPU matrix makes of what its processes found, and of what Transformer Engine logs, without a GPU."""

import pytest
from gpu.megatron_results import find_kernels, format_table, is_failure, judge_row, make_line, summarize

FUSED = """\
[2026-11-22 14:02:11,420] DEBUG | Available backends = {FlashAttention=False, FusedAttention=True (sub-backend 1), \
UnfusedDotProductAttention=True}
INFO:DotProductAttention:Running with FusedAttention backend (sub-backend 1)
[INFO     | DotProductAttention]: Running with FusedAttention backend (sub-backend 1)
"""
UNFUSED = "[INFO     | DotProductAttention]: Running with UnfusedDotProductAttention backend\n"
FLASH = "[INFO     | DotProductAttention]: Running with FlashAttention backend (version 2.8.3)\n"


def make_rank(**found):
    return {
        "reproduces": True,
        "equal": True,
        "differ": "0 of 9 [] losses True",
        "tags": ["core_attn", "attn_proj", "expert_fc1"],
        "moved": {"core_attn": 64, "attn_proj": 0, "expert_fc1": 64},
        **found,
    }


def judge(*ranks, log=FUSED, expected_kernel="FusedAttention"):
    return judge_row("row", ranks or [make_rank()], expected_kernel=expected_kernel, log=log)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (FUSED, ["FusedAttention"]),
        (UNFUSED, ["UnfusedDotProductAttention"]),
        (FLASH, ["FlashAttention"]),
        (FUSED + FUSED, ["FusedAttention"]),
        (UNFUSED + FUSED, ["FusedAttention", "UnfusedDotProductAttention"]),
        ("Selected backend = FusedAttention\n", []),
        ("", []),
    ],
)
def test_kernels_are_read_from_the_log(log, expected):
    assert find_kernels(log) == expected


def test_a_row_whose_every_bit_is_equal_is_equal():
    assert judge() == {"row": "row", "moved": "2 of 3", "attention": "FusedAttention", "reproduces": "yes", "equal": "yes"}
    assert judge(log=UNFUSED, expected_kernel="UnfusedDotProductAttention")["equal"] == "yes"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (UNFUSED, "UnfusedDotProductAttention"),
        (FUSED + UNFUSED, "FusedAttention and UnfusedDotProductAttention"),
        ("", "a kernel that nobody named"),
    ],
)
def test_a_row_that_ran_another_kernel_fails_also_where_the_right_one_ran_too(log, said):
    assert judge(log=log)["equal"] == f"no: attention ran with {said}, not FusedAttention"


def test_all_faults_of_a_row_are_told():
    found = judge(make_rank(), make_rank(equal=False, reproduces=False, differ="1 of 9 | ['a']"), log=UNFUSED)
    assert found["reproduces"] == "no"
    for said in ("does not reproduce itself", "bits differ: ", "1 of 9 / ['a']", "attention ran with Unfused"):
        assert said in found["equal"]


def test_a_tag_that_moved_on_no_rank_fails_unless_another_tag_moves_its_storage():
    first, last = make_rank(moved={"core_attn": 64}), make_rank(moved={"expert_fc1": 64})
    assert judge(first)["equal"] == "no: nothing moved of expert_fc1"
    assert judge(first, last)["equal"] == "yes"


def test_a_row_that_this_megatron_cannot_take_is_shown_with_the_reason_and_is_no_failure():
    lines = [judge(), make_line("other", "refused: it has no such dispatcher"), make_line("third", "failed: a | b")]
    assert [is_failure(line) for line in lines] == [False, False, True]
    assert summarize(lines, "0.20.0") == "Megatron-Core 0.20.0: 1 of 2 rows are equal to the bit, 1 refused."
    assert summarize(lines[:1], "0.16.1") == "Megatron-Core 0.16.1: 1 of 1 rows are equal to the bit."
    table = format_table(lines, "0.20.0").splitlines()
    assert table[0] == summarize(lines, "0.20.0")
    assert table[2:4] == ["| row | tags that moved | attention | reproduces itself | equal |", "|" + " --- |" * 5]
    assert table[5:] == [
        "| other | - | - | - | refused: it has no such dispatcher |",
        "| third | - | - | - | failed: a / b |",
    ]
