"""Compares steps with and without a plan: the cost of a launch-bound host."""

import dataclasses
import math

from fgoffload.errors import ConfigError
from fgoffload.plan import Action, OffloadPlan, Site


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteAction:
    """A row of a plan."""

    site: Site
    """Where."""
    action: Action
    """The action."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """Steps under a plan, measured in turn with steps of the same training that keep all."""

    sites: tuple[SiteAction, ...]
    """The plan: what it does not name is kept."""
    loss_window_bytes: int | None = None
    """As `OffloadPlan` has it."""
    step_s: float
    """Seconds under the plan: the median, of the slowest process."""
    keeping_step_s: float
    """Seconds of those that keep all, measured in the same way in between."""

    def __post_init__(self) -> None:
        """Refuse steps that take no time, and a plan by which nothing leaves.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
        for name in ("step_s", "keeping_step_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)} is no time of a step. Give seconds above 0.")
        if not any(row.action.offloads for row in self.sites):
            raise ConfigError("sites has nothing that leaves: without copies no step says how late they make it. Leave it out.")

    @property
    def plan(self) -> OffloadPlan:
        """Return the plan, for all ranks."""
        return OffloadPlan(
            actions={row.site: row.action for row in self.sites},
            loss_window_bytes=self.loss_window_bytes,
        )

    @property
    def added_s(self) -> float:
        """Return what a step takes longer under the plan."""
        return self.step_s - self.keeping_step_s

    @classmethod
    def from_plan(cls, plan: OffloadPlan, *, step_s: float, keeping_step_s: float) -> "ComparedStep":
        """Return what steps under `plan` took.

        Args:
            plan: For all ranks.
            step_s: Seconds of a step under it.
            keeping_step_s: Seconds of a step that keeps all.
        """
        return cls(
            sites=tuple(SiteAction(site=site, action=plan.actions[site]) for site in sorted(plan.actions)),
            loss_window_bytes=plan.loss_window_bytes,
            step_s=step_s,
            keeping_step_s=keeping_step_s,
        )
