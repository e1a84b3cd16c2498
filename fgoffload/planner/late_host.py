"""Plans for a host that launches kernels late, and what a few steps under a plan took.

[Note: A late host]
Where each layer lets the host wait, as token dispatchers do, the host begins anew in each layer, and some hosts need longer for
the launches of a layer than the device does for its kernels. All that slows such a host is on the clock, and copies do: on
three machines with an H100 a look-up that misses caches took 1.16 to 1.29 times as long beside copies to the host, and 1.36 to
1.85 times as long beside copies both ways. What the engine does for each group comes on top; `slow_down` has both. A hardware
table does not know which host a training will have, and a profile, which compares a few steps ([Note: What copies cost a late
host] in `host_slowdown`), not who will share it. So there is a plan for either.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence

from fgoffload.planner.host_slowdown import slow_down
from fgoffload.planner.ranks.rank_model import RankModel
from fgoffload.planner.timing.link_rates import COMPUTE_SLOWDOWN
from fgoffload.units import format_bytes, format_ms


class HostGuess(enum.Enum):
    """Whether a plan takes the step for launch-bound."""

    IN_TIME = "a step that is not launch-bound"
    LATE = "a launch-bound step"


LATE_HOST_SLOWDOWN = 0.1
"""What compute of a training takes longer beside copies, as a part, with such a host, whose groups cost what that goes with.
Source: the compared steps of four runs of W2 on H100s say 0.088, 0.145, 0.095 and 0.090 (docs/concepts/planner.md)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Measured peak and time of a few steps under a plan."""

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


def describe_tried(first: Tried, second: Tried, *, made: tuple[str, str]) -> str:
    """Return what two plans took, for a log.

    Args:
        first: Of one.
        second: Of the other.
        made: What each was made for, or of: `for a launch-bound step`.
    """
    return f"a step takes {first.describe()} by the plan {made[0]}, and {second.describe()} by the one {made[1]}"


def assume_host(ranks: Sequence[RankModel], guess: HostGuess) -> tuple[RankModel, ...]:
    """Return `ranks` as they are with another host. See [Note: A late host].

    Args:
        ranks: The pipeline, by number.
        guess: The host. One that is in time is no slower beside copies than the device, a late one no faster than it was.
    """
    if guess is HostGuess.LATE:
        return slow_down(ranks, LATE_HOST_SLOWDOWN)
    links = (
        dataclasses.replace(rank.link, compute_slowdown=min(rank.link.compute_slowdown, COMPUTE_SLOWDOWN)) for rank in ranks
    )
    return tuple(dataclasses.replace(rank, link=link, late_group_s=0.0) for rank, link in zip(ranks, links, strict=True))
