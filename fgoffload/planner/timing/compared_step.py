"""Compares steps with and without a plan: the cost of a launch-bound host."""

import dataclasses
import math

from fgoffload.errors import ConfigError
from fgoffload.plan import Action, OffloadPlan, Site


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteAction:
    """Site and action: one row of a plan."""

    site: Site  # site of the action
    action: Action  # treatment of the site


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """Step times under a plan and of the baseline, measured alternately in the same training."""

    sites: tuple[SiteAction, ...]  # rows of the plan. Sites that it does not name stay on the GPU.
    loss_window_bytes: int | None = None  # same field of `OffloadPlan`
    step_s: float  # seconds of a step under the plan: median of the slowest process
    keeping_step_s: float  # seconds of a baseline step that offloads nothing, measured the same way in between

    def __post_init__(self) -> None:
        """Refuse step times of 0, and plans that offload nothing."""
        for name in ("step_s", "keeping_step_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)} is no time of a step. Give seconds above 0.")
        if not any(row.action.offloads for row in self.sites):
            raise ConfigError("sites has nothing that leaves: without copies no step says how late they make it. Leave it out.")

    @property
    def plan(self) -> OffloadPlan:
        """Return the plan, for all ranks."""
        return OffloadPlan(actions={row.site: row.action for row in self.sites}, loss_window_bytes=self.loss_window_bytes)

    @property
    def added_s(self) -> float:
        """Seconds that the plan adds to a step."""
        return self.step_s - self.keeping_step_s

    @classmethod
    def from_plan(cls, plan: OffloadPlan, *, step_s: float, keeping_step_s: float) -> "ComparedStep":
        """Return the measured steps under `plan`."""
        return cls(
            sites=tuple(SiteAction(site=site, action=plan.actions[site]) for site in sorted(plan.actions)),
            loss_window_bytes=plan.loss_window_bytes,
            step_s=step_s,
            keeping_step_s=keeping_step_s,
        )
