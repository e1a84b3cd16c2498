"""Identifies where in a step a tensor was saved, for errors, logs and profiler ranges."""

import dataclasses

from fgoffload.plan import Site


@dataclasses.dataclass(slots=True, eq=False)
class Place:
    """Site (None between sites) and microbatch of a save. The text is created on demand, because it is rarely needed."""

    site: Site | None
    lane: str

    def __str__(self) -> str:
        """Return the text, such as `layers.3.core_attn mb=2`."""
        return self.lane if self.site is None else f"{self.site} {self.lane}"
