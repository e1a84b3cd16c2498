"""Names the place in a step where something was saved, for errors, logs and profiler ranges."""

import dataclasses

from fgoffload.plan import Site


@dataclasses.dataclass(slots=True, eq=False)
class Place:
    """Site, or None between sites, and microbatch. The text, rarely needed, is made on demand."""

    site: Site | None
    lane: str

    def __str__(self) -> str:
        """Return the text, such as `layers.3.core_attn mb=2`."""
        return self.lane if self.site is None else f"{self.site} {self.lane}"
