"""Plans for a host that launches kernels late, and which of two plans is the better one by a few steps of each.

[Note: A late host]
Where each layer lets the host wait, as token dispatchers do, the host begins anew in each layer, and some hosts need longer for
the launches of a layer than the device does for its kernels. All that slows such a host is on the clock, and copies do: on
three machines with an H100 a look-up that misses caches took 1.16 to 1.29 times as long beside copies to the host, and 1.36 to
1.85 times as long beside copies both ways. What the engine does for each group comes on top. Neither a hardware table nor a
profile knows which host a training will have, or who shares it. So there is a plan for either, and a few steps say which one is
faster.
"""

import dataclasses
import math
from collections.abc import Sequence

from fgoffload.planner.host_slowdown import slow_down
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.units import format_bytes, format_ms

IN_TIME, LATE = "a host that is in time", "a late host"
"""What a plan takes the host for, in words."""

LATE_HOST_SLOWDOWN = 0.2
"""What compute of a training takes longer beside copies, as a part, with such a host. Source: plans of W2 for 20.2, 18.9, 16.5
and 14.6 GiB took on an H100 what a slowdown of 0.07, 0.22, 0.24 and 0.19 says (docs/results/w2_moe_h100_202611.md)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a few steps under a plan took."""

    peak_bytes: int
    """Device bytes at their worst moment on any rank; 0 where nobody counts them."""
    step_s: float
    """Their median; infinite where they did not end."""

    def score(self, budget_bytes: int) -> tuple[int, float]:
        """Return what a better plan has less of: bytes above the budget, and time."""
        return (max(self.peak_bytes - budget_bytes, 0), self.step_s)

    def describe(self) -> str:
        """Return both, for a log."""
        peak = f" at {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
        return f"{format_ms(self.step_s)}{peak}" if self.step_s < math.inf else f"more than {format_bytes(self.peak_bytes)}"


def describe_trial(first: Tried, late: Tried) -> str:
    """Return what the plan for a host that is in time and the one for a late host took, for a log."""
    return f"a step takes {first.describe()} by the plan for {IN_TIME}, and {late.describe()} by the one for {LATE}"


def assume_late_host(ranks: Sequence[RankModel]) -> tuple[RankModel, ...]:
    """Return `ranks` as they are with a host that launches late. See [Note: A late host].

    Args:
        ranks: The pipeline, by number.
    """
    return slow_down(ranks, LATE_HOST_SLOWDOWN)
