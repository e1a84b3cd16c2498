"""How long the search for a plan may take: counted in simulations, so that a plan is the same on every machine."""

import dataclasses

from fgoffload.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """How long to look for a plan."""

    exhaustive_plans: int = 5000
    """Where there are no more plans than this, all of them are simulated and the best is taken. 0 never does that."""
    exhaustive_passes: int = 40_000
    """Forwards and backwards of single layers that may be simulated so, over all ranks. Beyond that no rank is looked through:
    48 stages of a layer each, which has 2754 ways to be treated, would take seven million."""
    simulations: int = 400
    """Simulations that may be spent on bettering what programs say, over all ranks. When they are used up, the best plan so far
    is taken: the same one on every machine."""
    layer_passes: int = 8_000
    """The same limit for large models: forwards and backwards of single layers in those simulations. One takes 25 to 100 us."""
    ladder_passes: int = 8_000
    """Forwards and backwards of single layers that may be simulated for plans by rule of thumb, over all ranks."""
    walk_simulations: int = 1_600
    """Simulations of one rank that random walks over its plans may take."""
    walk_passes: int = 24_000
    """Forwards and backwards of single layers that may be simulated in random walks, over all ranks. With too few for each no
    walk is begun, as on deep pipelines."""
    settling_passes: int = 2_000
    """The same limit for plans that are about as fast, and have the host do less, over all ranks."""
    trimming_passes: int = 8_000
    """The same limit for plans without a row, over all ranks."""
    programs: int = 3
    """Times that the program of a rank is solved at most: again where its peak was off."""
    gap: float = 1e-3
    """How far from its best a program may stop, as a part of the time of a step."""

    def __post_init__(self) -> None:
        """Refuse what is no limit.

        Raises:
            ConfigError: With the field, the value and the fix.
        """
        for name, least in (
            ("exhaustive_plans", 0),
            ("exhaustive_passes", 0),
            ("simulations", 0),
            ("layer_passes", 0),
            ("ladder_passes", 0),
            ("walk_simulations", 0),
            ("walk_passes", 0),
            ("settling_passes", 0),
            ("trimming_passes", 0),
            ("programs", 1),
        ):
            limit = getattr(self, name)
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < least:
                raise ConfigError(f"{name} {limit!r} is no whole number from {least}. Give one.")
        if not 0 <= self.gap < 1:
            raise ConfigError(f"gap {self.gap!r} is not from 0 to below 1. Give a part of the step, as in 0.001.")


THOROUGH = SearchLimits(
    simulations=4000,
    layer_passes=200_000,
    ladder_passes=40_000,
    walk_simulations=16_000,
    walk_passes=240_000,
    settling_passes=40_000,
    trimming_passes=40_000,
)
"""For whoever has minutes: about ten times as long as the default, and of W2 at 14.6 GiB a step that is 1.3% shorter."""
