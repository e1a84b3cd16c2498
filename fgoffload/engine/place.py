"""Names the place in a step where something was saved, for errors, logs and profiler ranges."""

from fgoffload.plan import Site


class Place:
    """Site, or None between sites, and microbatch. The text is made only when it is read, which is rare."""

    __slots__ = ("_lane", "site")

    def __init__(self, site: Site | None, lane: str) -> None:
        self.site = site
        self._lane = lane

    def __str__(self) -> str:
        """Return the place, as in `layers.3.core_attn mb=2`."""
        return self._lane if self.site is None else f"{self.site} {self._lane}"
