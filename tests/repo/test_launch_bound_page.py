"""What the page of small operators says of its run in turn is what the run's steps come to."""

import csv
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from scipy import stats

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = (RESULTS / "launch_bound_202611.md").read_text(encoding="utf-8")
RUN = "launch_bound_dispatch_turns.csv"
PLAN, MEGATRON = ("plan:launch_bound_dispatch", "nothing"), ("megatron:expert_fc1", "nothing (megatron)")
"""Each with the `nothing` of its own kind of process."""


@pytest.fixture(scope="module")
def steps() -> dict[tuple[str, int], list[float]]:
    """Milliseconds by setting and repeat, in the order of the rounds."""
    found: dict[tuple[str, int], list[float]] = {}
    with (RESULTS / "runs" / RUN).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["setting"], int(row["repeat"])), []).append(float(row["step ms"]))
    return found


def find_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean with Student's interval of 95%."""
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    reach = error * stats.t.ppf(0.975, len(values) - 1)
    return mean, mean - reach, mean + reach


def over_rounds(own: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(one / beside for one, beside in zip(own, other, strict=True))


def over_medians(own: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(own) / statistics.median(other)


def list_excess(steps: dict[tuple[str, int], list[float]], over: Callable[..., float]) -> list[float]:
    """Return by repeat what the plan adds less half of what Megatron's engine adds."""
    repeats = sorted({repeat for _, repeat in steps})

    def add(pair: tuple[str, str], repeat: int) -> float:
        return over(steps[pair[0], repeat], steps[pair[1], repeat]) - 1

    return [add(PLAN, repeat) - add(MEGATRON, repeat) / 2 for repeat in repeats]


def test_the_page_counts_the_steps_that_are_there(steps):
    (count,) = re.findall(rf"All\s+(\d+) steps are in \[`{RUN}`\]", PAGE)
    assert int(count) == sum(map(len, steps.values()))


def test_what_the_target_comes_to_is_what_the_steps_say(steps):
    excess = list_excess(steps, over_rounds)
    by_repeat = " ".join(f"{one:.3f}" for one in excess)
    mean, low, high = find_interval(excess)
    assert f"is {by_repeat} by repeat: {mean:.3f} [{low:.3f} {high:.3f}]" in PAGE
    mean, low, high = find_interval(list_excess(steps, over_medians))
    assert f"it is {mean:.3f} [{low:.3f} {high:.3f}]" in PAGE
