"""What nobody beats in memory and time, and the picture of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgoffload.benchmark.frontier import (
    LINES,
    MOST_RATIO,
    Point,
    find_fastest,
    find_frontier,
    list_simulated,
    write_frontier_plot,
)
from fgoffload.benchmark.measurement import Measurement, Summary
from fgoffload.benchmark.prediction import Forecast, Prediction, Source
from fgoffload.benchmark.settings import NAMED_SYSTEMS, ProcessKind, System, parse_setting

GIB = 2**30


def summary(name, peak_gib, ratio):
    measurement = Measurement(step_seconds=(ratio,), peak_allocated_bytes=int(peak_gib * GIB))
    return Summary(
        setting=parse_setting(name), process=ProcessKind.MAIN, step_seconds=(ratio,), ratios=(ratio,), worst=measurement
    )


def forecast(peak_gib, ratio, *, source=Source.TABLE):
    prediction = Prediction(step_s=ratio, ratio=ratio, peak_bytes=int(peak_gib * GIB), static_bytes=0)
    return Forecast(predictions={source: prediction})


def failed(name):
    return Summary(setting=parse_setting(name), process=ProcessKind.MAIN, failure="out of memory")


def test_a_setting_that_takes_more_of_both_than_another_is_not_on_the_frontier():
    points = [Point(20, 1.0), Point(15, 1.1), Point(16, 1.2), Point(10, 1.3), Point(15, 1.05)]
    assert find_frontier(points) == [Point(20, 1.0), Point(15, 1.05), Point(10, 1.3)]


POINTS = st.lists(st.builds(Point, st.integers(1, 50), st.integers(1, 50)), max_size=20)


@settings(deadline=None, max_examples=100)
@given(POINTS)
def test_every_point_is_beaten_by_one_of_the_frontier_and_none_of_those_by_another(points):
    frontier = find_frontier(points)
    assert set(frontier) <= set(points)
    for point in points:
        assert any(one.peak_bytes <= point.peak_bytes and one.ratio <= point.ratio for one in frontier)
    for one in frontier:
        assert not any(other != one and other.peak_bytes <= one.peak_bytes and other.ratio <= one.ratio for other in frontier)
    assert [one.ratio for one in frontier] == sorted(one.ratio for one in frontier)


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


def test_every_system_that_can_be_named_has_a_line():
    assert set(LINES) == set(NAMED_SYSTEMS)
    assert len({label for label, _, _ in LINES.values()}) == len(LINES)


@pytest.fixture
def drawn(monkeypatch):
    """What matplotlib was asked to draw: lines by color, scattered points by label."""
    from matplotlib.axes import Axes

    found = {"lines": [], "points": {}, "texts": []}
    plot, scatter, annotate = Axes.plot, Axes.scatter, Axes.annotate

    def record_plot(self, x, y, **style):
        found["lines"].append((style.get("color"), style.get("linestyle", "-"), list(zip(x, y, strict=True))))
        return plot(self, x, y, **style)

    def record_scatter(self, x, y, **style):
        found["points"][style["label"]] = list(zip(x, y, strict=True))
        return scatter(self, x, y, **style)

    def record_annotate(self, text, *args, **style):
        found["texts"].append(text)
        return annotate(self, text, *args, **style)

    monkeypatch.setattr(Axes, "plot", record_plot)
    monkeypatch.setattr(Axes, "scatter", record_scatter)
    monkeypatch.setattr(Axes, "annotate", record_annotate)
    return found


def test_the_picture_has_a_line_for_each_system_from_nothing_along_its_frontier(tmp_path, drawn):
    found = [summary("nothing", 20, 1.0), summary("ours:core_attn", 18, 1.1), summary("ours:router", 19, 1.2)]
    found += [summary("recompute:full", 12, 1.3), failed("te-layers:2")]
    write_frontier_plot(tmp_path / "frontier.png", found, title="a model")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert drawn["points"] == {
        LINES[System.NOTHING][0]: [(20.0, 1.0)],
        LINES[System.OURS][0]: [(18.0, 1.1), (19.0, 1.2)],
        LINES[System.RECOMPUTE][0]: [(12.0, 1.3)],
    }
    assert (LINES[System.OURS][1], "-", [(20.0, 1.0), (18.0, 1.1)]) in drawn["lines"]
    assert (LINES[System.RECOMPUTE][1], "-", [(20.0, 1.0), (12.0, 1.3)]) in drawn["lines"]
    assert [points for _, style, points in drawn["lines"] if style == "--"] == []


def test_dashed_lines_go_through_what_is_predicted_of_plans_of_the_planner_apart_from_others(tmp_path, drawn):
    found = [
        summary("nothing", 20, 1.0),
        summary("plan:x.json", 17, 1.2),
        summary("budget:18GiB", 18, 1.06),
        summary("budget:16GiB", 16, 1.2),
        failed("budget:12GiB"),
    ]
    forecasts = {
        parse_setting("nothing"): forecast(21, 1.0),
        parse_setting("plan:x.json"): forecast(16, 1.125),  # one of the user's
        parse_setting("budget:18GiB"): forecast(18, 1.05),
        parse_setting("budget:16GiB"): forecast(15.5, 1.125),
    }
    write_frontier_plot(tmp_path / "frontier.png", found, title="a model", forecasts=forecasts)
    dashed = [(color, points) for color, style, points in drawn["lines"] if style == "--"]
    assert dashed == [
        (LINES[System.PLAN][1], [(16.0, 1.125), (21.0, 1.0)]),
        (LINES[System.BUDGET][1], [(15.5, 1.125), (18.0, 1.05), (21.0, 1.0)]),
    ]
    assert list_simulated(found[:2], forecasts, System.BUDGET) == []


def test_dashed_lines_are_of_the_profile_where_there_is_one():
    found = [summary("nothing", 20, 1.0), summary("budget:18GiB", 18, 1.06), summary("budget:16GiB", 16, 1.2)]
    nothing, higher, lower = (one.setting for one in found)
    forecasts = {
        nothing: forecast(21, 1.0, source=Source.PROFILE),
        # The one that nothing is known of by the profile is not in a line of its numbers.
        higher: forecast(18, 1.05),
        lower: forecast(16, 1.125, source=Source.PROFILE),
    }
    assert list_simulated(found, forecasts, System.BUDGET) == [Point(16 * GIB, 1.125), Point(21 * GIB, 1.0)]


def test_a_setting_far_beyond_the_others_does_not_squeeze_them(tmp_path, drawn):
    write_frontier_plot(tmp_path / "f.png", [summary("nothing", 20, 1.0), summary("save_on_cpu", 12, 4.25)], title="a model")
    assert drawn["points"][LINES[System.SAVE_ON_CPU][0]] == [(12.0, MOST_RATIO)]
    assert drawn["texts"] == ["4.2"]


def test_a_picture_of_nothing_but_failures_can_be_drawn(tmp_path):
    write_frontier_plot(tmp_path / "f.svg", [failed("recompute:full")], title="a model")
    assert (tmp_path / "f.svg").stat().st_size > 0
