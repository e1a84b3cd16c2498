"""Tests the Pareto frontier of memory and time."""

from fgoffload.benchmark.frontier import Point, find_frontier


def test_dominated_settings_are_not_on_the_frontier():
    points = [Point(20, 1.0), Point(15, 1.1), Point(16, 1.2), Point(10, 1.3), Point(15, 1.05)]
    assert find_frontier(points) == [Point(20, 1.0), Point(15, 1.05), Point(10, 1.3)]
