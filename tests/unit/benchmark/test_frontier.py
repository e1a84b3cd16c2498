"""What nobody beats in memory and time, and the picture of it."""

from fgoffload.benchmark.frontier import (
    Point,
    find_fastest,
    find_frontier,
)
from fgoffload.benchmark.measurement import Measurement, Summary
from fgoffload.benchmark.settings import ProcessKind, System, parse_setting

GIB = 2**30


def summary(name, peak_gib, ratio):
    measurement = Measurement(step_seconds=(ratio,), peak_allocated_bytes=int(peak_gib * GIB))
    return Summary(
        setting=parse_setting(name), process=ProcessKind.MAIN, step_seconds=(ratio,), ratios=(ratio,), worst=measurement
    )


def failed(name):
    return Summary(setting=parse_setting(name), process=ProcessKind.MAIN, failure="out of memory")


def test_a_setting_that_takes_more_of_both_than_another_is_not_on_the_frontier():
    points = [Point(20, 1.0), Point(15, 1.1), Point(16, 1.2), Point(10, 1.3), Point(15, 1.05)]
    assert find_frontier(points) == [Point(20, 1.0), Point(15, 1.05), Point(10, 1.3)]


def test_the_fastest_of_a_system_is_the_one_within_the_budget():
    found = [
        summary("ours:core_attn", 19, 1.1),
        summary("ours:expert_fc1", 18, 1.2),
        summary("ours:router", 21, 1.0),
        summary("recompute:full", 15, 1.3),
        failed("ours:moe_act"),
    ]

    def find(system, budget_gib):
        fastest = find_fastest(found, systems=(system,), budget_bytes=int(budget_gib * GIB))
        return None if fastest is None else fastest.setting.name

    assert find(System.OURS, 22) == "ours:router"
    assert find(System.OURS, 20) == "ours:core_attn"
    assert find(System.OURS, 19) == "ours:core_attn"
    assert find(System.OURS, 18.5) == "ours:expert_fc1"
    assert find(System.OURS, 17) is None
    assert find(System.RECOMPUTE, 17) == "recompute:full"
