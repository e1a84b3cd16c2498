"""Measured step times with and without a plan, which show how much copies slow a launch-bound step."""

import dataclasses
import math

from fgoffload.errors import ConfigError
from fgoffload.plan import Action, OffloadPlan, Site


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteAction:
    """One row of a plan: a site and its action."""

    site: Site  # layer and tag
    action: Action


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """Step times under a plan and of the baseline, measured alternately in the same run."""

    sites: tuple[SiteAction, ...]  # rows of the plan; other sites stay on the GPU
    loss_window_bytes: int | None = None  # as in `OffloadPlan`
    step_s: float  # median seconds per step under the plan, on the slowest process
    keeping_step_s: float  # median seconds per step of the baseline, on the slowest process

    def __post_init__(self) -> None:
        for name in ("step_s", "keeping_step_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)} is not a step time. Use a number of seconds above 0.")
        if not any(row.action.offloads for row in self.sites):
            raise ConfigError("sites contains no offload, so the step cannot show the cost of copies. Remove the step.")

    @property
    def plan(self) -> OffloadPlan:
        """Return the plan, which covers all ranks."""
        return OffloadPlan(actions={row.site: row.action for row in self.sites}, loss_window_bytes=self.loss_window_bytes)

    @classmethod
    def from_plan(cls, plan: OffloadPlan, *, step_s: float, keeping_step_s: float) -> "ComparedStep":
        """Build the comparison from `plan` and its measured step times."""
        return cls(
            sites=tuple(SiteAction(site=site, action=plan.actions[site]) for site in sorted(plan.actions)),
            loss_window_bytes=plan.loss_window_bytes,
            step_s=step_s,
            keeping_step_s=keeping_step_s,
        )
