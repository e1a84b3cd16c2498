"""Where in a step something was saved, for errors, logs and profiler ranges."""

from fgoffload.plan import Site


class Place:
    """A site, or none between the sites, and a microbatch. The text is made when somebody reads it, which is seldom."""

    __slots__ = ("_lane", "site")

    def __init__(self, site: Site | None, lane: str) -> None:
        self.site = site
        self._lane = lane

    def __str__(self) -> str:
        """Return the place, as in `layers.3.core_attn mb=2`."""
        return self._lane if self.site is None else f"{self.site} {self._lane}"
